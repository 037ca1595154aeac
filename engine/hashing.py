"""Names for KV blocks: a chained hash, so that equal names mean equal tokens, and equal pictures, from the first on.

128 bits of BLAKE2b (RFC 7693): long enough that nobody finds two prompts with one name.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b

from engine.media.item import MediaItem

DIGEST_SIZE = 16


def hash_seed(model_fingerprint: bytes, cache_salt: str | None = None) -> bytes:
    """The parent of a sequence's first block: KV of other weights, or under another salt, never matches."""
    return blake2b(cache_salt.encode() if cache_salt else b"", digest_size=DIGEST_SIZE, key=model_fingerprint).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the block that holds `token_ids` after the blocks named by `parent`."""
    return blake2b(array("I", token_ids).tobytes(), digest_size=DIGEST_SIZE, key=parent).digest()


def with_media(parent: bytes, media: Sequence[MediaItem], start: int, stop: int) -> bytes:
    """The parent of a block of the tokens [start, stop): another one if pictures have placeholders there, for those
    look the same for every picture."""
    shown = b""
    for item in media:
        first = bisect_left(item.positions, start)
        if first < len(item.positions) and item.positions[first] < stop:
            name = item.identifier.encode()
            shown += array("I", [len(name), first, item.positions[first] - start]).tobytes() + name
    return blake2b(shown, digest_size=DIGEST_SIZE, key=parent).digest() if shown else parent

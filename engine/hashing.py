"""Names for KV blocks: a chained hash, so that equal names mean equal tokens from the start of the sequence.

128 bits of BLAKE2b (RFC 7693): long enough that nobody finds two prompts with one name.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_SIZE = 16


def hash_seed(model_fingerprint: bytes, cache_salt: str | None = None) -> bytes:
    """The parent of a sequence's first block: KV of other weights, or under another salt, never matches."""
    return blake2b(cache_salt.encode() if cache_salt else b"", digest_size=DIGEST_SIZE, key=model_fingerprint).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the block that holds `token_ids` after the blocks named by `parent`."""
    return blake2b(array("I", token_ids).tobytes(), digest_size=DIGEST_SIZE, key=parent).digest()

"""How much of what a decode engine offers is KV of the new prompt: the token ids are compared, nothing is believed.

The offer of the last turn is good for exactly the tokens it was computed from. The new prompt may share all of them,
fewer (the history was edited, the reasoning dropped), or none, whatever the conversation is called.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from connectors.wire.transfer import KVTransferParams

Why = Literal[
    "offered",
    "self_checked",
    "unverified",
    "no_record",
    "no_offer",
    "mismatch",
    "short",
    "uncuttable",
    "media",
    "owner_down",
    "owner_restarted",
    "incompatible",
    "one_way",
    "gone",
]
"""What became of the last turn's blocks:

offered      the prefill engine may pull them
self_checked offered though the ids could not be compared: the engines compare content hashes themselves
unverified   the ids could not be compared, and the engines would not
no_record    first turn, or nothing is remembered
no_offer     remembered, but without blocks, or another turn has them
mismatch     the prompt does not begin with a block of what was computed
short        too few tokens to be worth a pull
uncuttable   only a part would do, and these blocks cannot be cut (several KV-cache groups, unknown block size)
media        ids do not say what is in a picture, and the engines would not compare
owner_down   the engine that has them cannot be reached now
owner_restarted  that engine has been started anew since, and has nothing left of them
incompatible the prefill engine cannot use KV of the engine that has them
one_way      the prefill engine is not known to pull: it was not started for that, or another turn is finding out
gone         lost in an attempt of this turn that failed
"""


@dataclass(frozen=True, slots=True)
class Verified:
    num_known: int
    """Tokens from the start of the prompt for which the decode engine has computed KV."""
    offer: KVTransferParams | None
    why: Why


def verify(
    offer: KVTransferParams, computed: array[int], prompt: array[int], *, least: int, block_size: int | None
) -> Verified:
    """What of `offer`, KV of the first tokens of `computed`, serves `prompt`.

    `least`: tokens below which a pull is not worth it. `block_size` is used where the owner does not say its own.
    """
    num_held = min(offer.remote_num_tokens or 0, len(computed))
    # The last token of a prompt is computed in any case, for its logits.
    num_known = min(common_prefix(computed, prompt), num_held, max(0, len(prompt) - 1))
    if num_known == 0:
        return Verified(0, None, "mismatch")
    if num_known < least:
        return Verified(num_known, None, "short")
    trimmed = offer.trimmed(num_known, block_size=block_size)
    if trimmed is None:
        block = offer.remote_block_size or block_size
        return Verified(num_known, None, "mismatch" if block is not None and num_known < block else "uncuttable")
    return Verified(num_known, trimmed, "offered")


def common_prefix(one: array[int], other: array[int]) -> int:
    """How many ids two sequences share from the start. Compares memory, not objects: 100,000 ids take microseconds."""
    size = one.itemsize
    a, b = memoryview(one).cast("B"), memoryview(other).cast("B")
    low, high = 0, min(len(one), len(other))
    if a[: high * size].tobytes() == b[: high * size].tobytes():  # as in most turns that go on
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * size : middle * size].tobytes() == b[low * size : middle * size].tobytes():
            low = middle
        else:
            high = middle - 1
    return low

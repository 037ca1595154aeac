"""What the model asks of an attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """Where the tokens of one forward pass stand. Sequences that have one token come first."""

    positions: Tensor
    """[tokens] int64: position of each token in its sequence."""
    slots: Tensor
    """[tokens] int64: block_id * block_size + offset, the place of each token's KV in the arena."""
    block_table: Tensor
    """[sequences, max_blocks] int32: each sequence's blocks, in order; unused entries are 0."""
    context_lens: Tensor
    """[sequences] int32: tokens of each sequence whose KV exists after this step."""
    num_decodes: int
    """Sequences with exactly one token in this step."""
    prefills: tuple[Prefill, ...]
    """The other sequences, in the order of their tokens."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence of several tokens in this step."""

    index: int
    """Row of the block table."""
    start: int
    """Its first token in this step."""
    num_tokens: int
    context_len: int


Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [tokens, heads + 2 * kv_heads, head_dim]) -> [tokens, heads * head_dim].

Rotates q and k, stores k and v in the arena and attends to everything stored of the same sequence up to the token
itself. May overwrite qkv."""


class Attention(Protocol):
    def begin(self, step: Step, cos: Tensor, sin: Tensor) -> Attend:
        """Prepare one forward pass; cos and sin are [tokens, head_dim / 2], float32."""

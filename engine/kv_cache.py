"""The KV cache: one block-major arena, so that a block is one piece of memory and one transfer."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

LAYOUT_NAME = "blocks-layers-kv-heads-tokens-dim/1"
"""Order of the arena's dimensions and its version; part of the fingerprint, since readers copy raw bytes."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV of one model: what two engines must have in common to read each other's blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return torch.Size(self.block_shape).numel() * self.dtype.itemsize

    def fingerprint(self, model_fingerprint: bytes) -> str:
        """Hex name, equal only on engines whose blocks hold the same bytes for the same tokens."""
        shape = "x".join(map(str, self.block_shape))
        text = f"{LAYOUT_NAME} {shape} {self.dtype}"
        return blake2b(text.encode(), digest_size=16, key=model_fingerprint).hexdigest()


class KVCache:
    """The memory of `num_blocks` blocks."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        shape = (num_blocks, *layout.block_shape)
        self.arena: Tensor
        """[num_blocks, layers, 2 (K, V), kv_heads, block_size, head_dim], contiguous. Zeroed, so that every page is
        touched: the first transfer into untouched memory takes several times as long."""
        if self.device.type == "cpu":
            self.arena = _huge_pages(num_blocks * layout.block_bytes).view(layout.dtype).view(shape).zero_()
        else:
            self.arena = torch.zeros(shape, dtype=layout.dtype, device=self.device)

    @property
    def base_address(self) -> int:
        return self.arena.data_ptr()


def _huge_pages(num_bytes: int) -> Tensor:
    """`num_bytes` of private memory as uint8, on huge pages where the system gives them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them; the arena works on small pages
            pass
    return torch.frombuffer(memory, dtype=torch.uint8)

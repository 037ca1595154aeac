"""Matrices as a GGUF file stores them: a step that must read all of them reads a fifth of their float32 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in blocks of 32 values along its rows: value = stored * scale + offset, in float32."""

    bits: int
    """Of a stored value: 4, unsigned and with an offset, or 8, signed and without."""
    stored: Tensor
    """uint8 [rows, bytes]. Of 4 bits, the low halves of a block's 16 bytes are its first 16 values. May be a view of a
    mapped file, so not to be kept."""
    scales: Tensor
    """float32 [rows, blocks]"""
    offsets: Tensor | None
    """As scales."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.stored, self.scales, self.offsets) if part is not None)

    def reordered(self, order: Callable[[Tensor], Tensor]) -> Quantized:
        """With its rows as `order`, a function of [rows, anything], puts them."""
        offsets = None if self.offsets is None else order(self.offsets)
        return Quantized(self.bits, order(self.stored), order(self.scales), offsets)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One or more weights that multiply the same input, one below the other."""

    weights: Sequence[Tensor]
    quantized: Sequence[Quantized | None]
    """Of each weight, the same values as stored in the file, if they are."""

    def dense(self) -> Tensor:
        return self.weights[0] if len(self.weights) == 1 else torch.cat([*self.weights])

    def blocks(self) -> Quantized | None:
        """The whole matrix as stored, if all of it is and in one format."""
        parts = [part for part in self.quantized if part is not None]
        if len(parts) < len(self.weights) or len({part.bits for part in parts}) > 1:
            return None
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return Quantized(
            bits=parts[0].bits,
            stored=torch.cat([part.stored for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            offsets=torch.cat(offsets) if offsets else None,
        )

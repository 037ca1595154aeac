"""GGML's block formats, turned into plain floats.

A quantised row is a run of blocks of 32 values: a 16-bit scale (and offset), then the values in 4 or 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.quantized import Quantized

BLOCK = 32
_CHUNK = 1 << 13
"""Blocks at a time: a quarter of a million values, which stay in the cache from one operation to the next."""


@dataclass(frozen=True, slots=True)
class _Format:
    """value = (stored - zero) * scale + offset; the 16-bit scale and offset come before the stored values."""

    bits: int
    zero: int = 0
    has_offset: bool = False

    @property
    def header_bytes(self) -> int:
        return 4 if self.has_offset else 2

    @property
    def block_bytes(self) -> int:
        return self.header_bytes + BLOCK * self.bits // 8


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = {"Q4_0": _Format(bits=4, zero=8), "Q4_1": _Format(bits=4, has_offset=True), "Q8_0": _Format(bits=8)}
SUPPORTED = (*_BLOCKS, *_PLAIN)


def dequantize(raw: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor of `shape` and `dtype` from `raw`, the uint8 bytes of a tensor of type `kind` (one of SUPPORTED).

    Values are computed in float32 and rounded once.
    """
    if (plain := _PLAIN.get(kind)) is not None:
        return raw.view(plain).reshape(shape).to(dtype, copy=True)
    form = _BLOCKS[kind]
    blocks = raw.view(-1, form.block_bytes)
    header = _header(blocks, form)
    out = torch.empty((len(blocks), BLOCK), dtype=dtype)
    # Scratch is allocated once: on a virtual machine, touching fresh memory costs more than the arithmetic.
    stored = torch.empty((min(_CHUNK, len(blocks)), BLOCK), dtype=torch.int8)
    values = torch.empty(stored.shape) if dtype != torch.float32 else None
    for start in range(0, len(blocks), _CHUNK):
        part = slice(start, start + _CHUNK)
        chunk, target = blocks[part], out[part]
        computed = target if values is None else values[: len(chunk)]
        computed.copy_(_stored(chunk, form, stored[: len(chunk)]))
        computed.mul_(header[part, :1])
        if form.has_offset:
            computed.add_(header[part, 1:])
        if values is not None:
            target.copy_(computed)
    return out.view(shape)


def as_stored(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Quantized | None:
    """The same matrix as it is stored, or None if it is not one of blocks. Its stored values may be a view of `raw`."""
    if kind not in _BLOCKS or len(shape) != 2:
        return None
    form, rows = _BLOCKS[kind], shape[0]
    blocks = raw.view(-1, form.block_bytes)
    header = _header(blocks, form)
    scales = header[:, 0].reshape(rows, -1)
    offsets = None
    if form.has_offset:
        offsets = header[:, 1].reshape(rows, -1)
    elif form.zero:
        offsets = scales * -form.zero
    return Quantized(form.bits, blocks[:, form.header_bytes :].reshape(rows, -1), scales, offsets)


def _header(blocks: Tensor, form: _Format) -> Tensor:
    """Scale, and offset if there is one, of each block in float32."""
    return blocks[:, : form.header_bytes].contiguous().view(torch.float16).float()


def _stored(chunk: Tensor, form: _Format, scratch: Tensor) -> Tensor:
    """The stored integers less their zero, int8 [blocks, 32]."""
    packed = chunk[:, form.header_bytes :]
    if form.bits == 8:
        return packed.view(torch.int8)
    # The low halves of the 16 bytes are the first 16 values, the high halves the rest.
    unsigned = scratch.view(torch.uint8)
    torch.bitwise_and(packed, 0x0F, out=unsigned[:, :16])
    torch.bitwise_right_shift(packed, 4, out=unsigned[:, 16:])
    return scratch.sub_(form.zero) if form.zero else scratch

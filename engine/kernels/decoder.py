"""All layers of a decode step as one call of the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.library import AttentionKernels, Kernels, PackedLinear


class LayerProducts(NamedTuple):
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


class _ProductStruct(ctypes.Structure):
    _fields_ = (("run", c_void_p), ("linear", c_void_p), ("columns", c_int64))


class _LayerStruct(ctypes.Structure):
    _fields_ = (("qkv", _ProductStruct), ("o", _ProductStruct), ("gate_up", _ProductStruct), ("down", _ProductStruct))


class _DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("heads", c_int64),
        ("cache", c_void_p),
        ("rope_store", c_void_p),
        ("attend", c_void_p),
        ("arena", c_void_p),
        ("block_size", c_int64),
        ("block_bytes", c_int64),
    )


class DecoderKernel:
    """For models whose layers do nothing else between their products; activations in float32."""

    def __init__(self, kernels: Kernels, layers: Sequence[LayerProducts], attention: AttentionKernels) -> None:
        self._kept = (layers, attention)  # what the structures point into
        self._layers = (_LayerStruct * len(layers))()
        for struct, products in zip(self._layers, layers, strict=True):
            for name, product in products._asdict().items():
                setattr(struct, name, _ProductStruct(*product.entry))
        heads, cache, rope_store, attend = attention.entry
        self._struct = _DecoderStruct(
            ctypes.addressof(self._layers), len(layers), heads, cache, rope_store, attend, *attention.blocks
        )
        self._pointer = ctypes.addressof(self._struct)
        self._row = 2 * layers[0].qkv.columns + layers[0].gate_up.columns
        self._run = kernels.decode_layers

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, block_table: Tensor, context_lens: Tensor
    ) -> None:
        """Of the last token of each sequence, [rows, hidden_size], in place; their KV is stored."""
        assert hidden.is_contiguous()
        assert hidden.dtype == torch.float32
        assert block_table.is_contiguous()
        rows = len(hidden)
        scratch = hidden.new_empty(rows * self._row)
        self._run(
            self._pointer,
            hidden.data_ptr(),
            rows,
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            block_table.data_ptr(),
            block_table.shape[1],
            context_lens.data_ptr(),
            scratch.data_ptr(),
        )

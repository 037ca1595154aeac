"""The C++ kernels as functions of tensors. All take contiguous CPU tensors and run on the threads torch uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.quantized import Quantized

_F32, _BF16 = torch.float32, torch.bfloat16
_SUFFIX = {_F32: "f32", _BF16: "bf16"}
_WEIGHTS = {_F32: ("f32", 1), _BF16: ("bf16", 1), 4: ("q4", 3), 8: ("q8", 3)}
"""Formats of a product's weights: their dtype, or the bits of quantised ones; the tensors they consist of."""
_ATTENTION = ((_F32, _F32), (_F32, _BF16), (_BF16, _BF16))
"""Dtypes of activations and of the cache that the attention kernels are compiled for."""


class _LinearStruct(ctypes.Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("gated", c_int32),
        ("features", c_int64),
        ("columns", c_int64),
    )


class _CacheStruct(ctypes.Structure):
    _fields_ = (
        ("arena", c_void_p),
        ("layers", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class _LinearFunctions(NamedTuple):
    """Of one format of the weights."""

    packed_bytes: Callable[..., int]
    pack: Callable[..., None]
    product: Callable[..., None]


class Kernels:
    """The compiled library. Loading a library that lacks a function raises AttributeError."""

    def __init__(self, library: ctypes.CDLL, openmp: ctypes.CDLL) -> None:
        self.lanes: int = library.simd_lanes()
        """Floats per vector register; head sizes must be a multiple of it."""
        self._set_num_threads = openmp.omp_set_num_threads

        def function(name: str, *arguments: type, returns: type | None = None) -> Callable[..., Any]:
            found = library[name]
            found.argtypes, found.restype = arguments, returns
            return found

        p, i, f = c_void_p, c_int64, c_float
        self._rms_norm = {t: function(f"rms_norm_{s}", p, i, i, p, f, p) for t, s in _SUFFIX.items()}
        self._silu_and_mul = {t: function(f"silu_and_mul_{s}", p, i, i, p) for t, s in _SUFFIX.items()}
        self._linear = {
            key: _LinearFunctions(
                function(f"linear_packed_bytes_{suffix}", p, returns=i),
                function(f"linear_pack_{suffix}", p, *[p] * num_parts, p),
                function(f"linear_{suffix}", p, p, i, p, p, p),
            )
            for key, (suffix, num_parts) in _WEIGHTS.items()
        }
        self._integer_product = {
            bits: function(f"linear_integer_{_WEIGHTS[bits][0]}", p, p, i, p, p, p) for bits in (4, 8)
        }
        self.decode_layers = function("decode_layers", p, p, i, p, p, p, p, i, p, p)
        """See DecoderKernel."""
        suffixes = {(a, c): f"{_SUFFIX[a]}_{_SUFFIX[c]}" for a, c in _ATTENTION}
        self._rope_store = {k: function(f"rope_store_{s}", p, i, p, i, i, p, p, p) for k, s in suffixes.items()}
        self._gather = {k: function(f"gather_{s}", p, i, p, i, p) for k, s in suffixes.items()}
        self._prefill = {
            k: function(f"paged_prefill_{s}", p, i, p, i, p, i, p, i, p) for k, s in suffixes.items() if k[0] == _F32
        }
        self._decode = {k: function(f"paged_decode_{s}", p, i, p, i, i, p, i, p, p) for k, s in suffixes.items()}

    def use_torch_threads(self) -> None:
        """Let kernels called from this thread use as many threads as torch; OpenMP keeps the number per thread."""
        self._set_num_threads(torch.get_num_threads())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension; weight is float32."""
        assert x.is_contiguous()
        out = torch.empty_like(x)
        size = weight.shape[0]
        self._rms_norm[x.dtype](x.data_ptr(), x.numel() // size, size, weight.data_ptr(), eps, out.data_ptr())
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * size] -> [rows, size]"""
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_and_mul[gate_up.dtype](gate_up.data_ptr(), rows, size, out.data_ptr())
        return out

    def pack_linear(
        self,
        weight: Tensor | Quantized,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        gated: bool = False,
        integer: bool = False,
    ) -> PackedLinear:
        """A product with `weight`, [out_features, in_features] float32, bfloat16 or quantised.

        norm: float32 weight of an RMSNorm of the input. gated: the weight is two halves, the result
        silu(first half) * second half. integer: of a quantised weight, compute in whole numbers, each input rounded to
        16 bits; faster, and off by about a 60,000th of a block's largest input.
        """
        assert not (gated and bias is not None)
        return PackedLinear(self, weight, bias, norm, eps, gated, integer)

    def attention_for(self, cache: KVCache, activations: torch.dtype, num_heads: int) -> AttentionKernels | None:
        """The kernels for one cache, or None if its dtype or head size is not among those compiled."""
        key = (activations, cache.layout.dtype)
        if key not in self._decode or cache.layout.head_dim % self.lanes:
            return None
        return AttentionKernels(
            cache, num_heads, self._rope_store[key], self._gather[key], self._prefill.get(key), self._decode[key]
        )


class PackedLinear:
    """[rows, in_features] float32 -> [rows, out_features] float32."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor | Quantized,
        bias: Tensor | None,
        norm: Tensor | None,
        eps: float,
        gated: bool,
        integer: bool,
    ) -> None:
        if isinstance(weight, Quantized):
            functions = kernels._linear[weight.bits]
            parts = [weight.scales, weight.offsets, weight.stored]
            num_rows, self._features = weight.stored.shape[0], weight.stored.shape[1] * 8 // weight.bits
            self._function = kernels._integer_product[weight.bits] if integer else functions.product
        else:
            functions = kernels._linear[weight.dtype]
            parts = [weight]
            num_rows, self._features = weight.shape
            self._function = functions.product
        self._columns = num_rows // 2 if gated else num_rows
        self._bias = None if bias is None else bias.float().contiguous()
        self._norm = None if norm is None else norm.contiguous()
        struct = _LinearStruct(
            None, _address(self._bias), _address(self._norm), eps, gated, self._features, self._columns
        )
        self._struct = struct
        self._pointer = ctypes.addressof(struct)
        self._packed = torch.empty(functions.packed_bytes(self._pointer), dtype=torch.uint8)
        parts = [None if part is None else part.contiguous() for part in parts]
        functions.pack(self._pointer, *map(_address, parts), self._packed.data_ptr())
        struct.packed = self._packed.data_ptr()

    @property
    def columns(self) -> int:
        return self._columns

    @property
    def entry(self) -> tuple[int, int, int]:
        """Addresses of the function and of its first argument, and the number of columns, for a caller in C++."""
        return _function_address(self._function), self._pointer, self._columns

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product, plus `residual` [rows, out_features]."""
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        assert x.shape[1] == self._features
        out = x.new_empty(x.shape[0], self._columns)
        self._function(self._pointer, x.data_ptr(), x.shape[0], _address(residual), out.data_ptr(), None)
        return out


def _function_address(function: Callable[..., None]) -> int:
    address = ctypes.cast(function, c_void_p).value  # type: ignore[arg-type]  # a function of the library
    assert address is not None
    return address


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class AttentionKernels:
    """The attention kernels bound to one cache. qkv: [tokens, heads + 2 * kv_heads, head_dim]."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        rope_store: Callable[..., None],
        gather: Callable[..., None],
        prefill: Callable[..., None] | None,
        decode: Callable[..., None],
    ) -> None:
        """`prefill`: None where activations are rounded."""
        layout = cache.layout
        self._cache = cache  # keeps the arena alive
        self._struct = _CacheStruct(
            cache.base_address, layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim
        )
        self._pointer = ctypes.addressof(self._struct)
        self._num_heads = num_heads
        self._rope_store, self._gather, self._prefill, self._decode = rope_store, gather, prefill, decode

    @property
    def entry(self) -> tuple[int, int, int, int]:
        """The number of query heads, and addresses of the cache and of two functions, for a caller in C++."""
        rope_store, decode = _function_address(self._rope_store), _function_address(self._decode)
        return self._num_heads, self._pointer, rope_store, decode

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The address of the cache, and tokens and bytes of each of its blocks."""
        return self._cache.base_address, self._cache.layout.block_size, self._cache.layout.block_bytes

    def rope_store(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> None:
        """Rotate q in place; store the rotated k, and v. cos, sin: [tokens, head_dim / 2]; slots: [tokens] int64."""
        assert qkv.is_contiguous()
        self._rope_store(
            self._pointer,
            layer,
            qkv.data_ptr(),
            qkv.shape[0],
            self._num_heads,
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
        )

    def gather(self, layer: int, blocks: Tensor, context_len: int, dtype: torch.dtype) -> Tensor:
        """[2, kv_heads, context, head_dim] of the sequence in `blocks` (int32)."""
        out = torch.empty(2, self._struct.kv_heads, context_len, self._struct.head_dim, dtype=dtype)
        self._gather(self._pointer, layer, blocks.data_ptr(), context_len, out.data_ptr())
        return out

    def prefill(self, layer: int, qkv: Tensor, block_table: Tensor, prefills: Tensor, out: Tensor) -> None:
        """Attention of the rows of qkv that `prefills` names, into those of `out`; qkv is float32.

        prefills: [sequences, 4] int64: row of the block table, first row of qkv, number of rows, and length of the
        sequence with these.
        """
        assert self._prefill is not None
        assert qkv.is_contiguous()
        assert block_table.is_contiguous()
        assert prefills.is_contiguous()
        self._prefill(
            self._pointer,
            layer,
            qkv.data_ptr(),
            self._num_heads,
            block_table.data_ptr(),
            block_table.shape[1],
            prefills.data_ptr(),
            prefills.shape[0],
            out.data_ptr(),
        )

    def decode(self, layer: int, qkv: Tensor, block_table: Tensor, context_lens: Tensor, out: Tensor) -> None:
        """Attention of the first len(context_lens) rows of qkv, each the last token of its sequence, into `out`."""
        assert qkv.is_contiguous()
        assert block_table.is_contiguous()
        self._decode(
            self._pointer,
            layer,
            qkv.data_ptr(),
            context_lens.shape[0],
            self._num_heads,
            block_table.data_ptr(),
            block_table.shape[1],
            context_lens.data_ptr(),
            out.data_ptr(),
        )

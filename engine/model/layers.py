"""The operations of a decoder layer: in torch for any device, and with the C++ kernels on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.library import Kernels
from engine.model.quantized import Matrix, Quantized

_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: Tensor
    """float32"""
    eps: float


class Linear(Protocol):
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[rows, in_features] -> [rows, out_features], with `residual` added."""


class Ops(Protocol):
    """The operations whose implementation depends on the device. Activations are in `dtype`."""

    dtype: torch.dtype

    def linear(self, matrix: Matrix, bias: Tensor | None = None, *, norm: Norm | None = None) -> Linear:
        """The product with `matrix` [out_features, in_features], of the input normed if there is a `norm`."""

    def gated_linear(self, matrix: Matrix, *, norm: Norm | None = None) -> Linear:
        """As linear with the two halves of `matrix`, the result being silu(first) * second."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...


class TorchOps:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, matrix: Matrix, bias: Tensor | None = None, *, norm: Norm | None = None) -> Linear:
        product = self._product(matrix.dense(), bias)

        def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
            out = product(x if norm is None else self.rms_norm(x, norm))
            return out if residual is None else out + residual

        return apply

    def gated_linear(self, matrix: Matrix, *, norm: Norm | None = None) -> Linear:
        product = self.linear(matrix, norm=norm)

        def apply(x: Tensor, residual: Tensor | None = None) -> Tensor:
            out = self.silu_and_mul(product(x))
            return out if residual is None else out + residual

        return apply

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        # Rounded before the weight is applied, as the models' reference implementations do.
        normed = F.rms_norm(x.float(), norm.weight.shape, None, norm.eps).to(x.dtype)
        return normed * norm.weight.to(x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def _product(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        weight = weight.to(self.dtype)
        bias = None if bias is None else bias.to(self.dtype)
        packs = self.dtype == torch.float32 or (self.dtype == torch.bfloat16 and computes_bfloat16(weight.device))
        if weight.device.type == "cpu" and packs and _ONEDNN:
            return _prepacked(weight, bias)
        return lambda x: F.linear(x, weight, bias)


class KernelOps(TorchOps):
    """Activations in float32, by our own kernels, which take weights in any format.

    Not for activations that are rounded: these sum in another order than torch, so a sum may be rounded otherwise.

    integer: those of quantised weights in whole numbers.
    """

    def __init__(self, kernels: Kernels, *, integer: bool = False) -> None:
        super().__init__(torch.float32)
        self.kernels = kernels
        self.integer = integer

    def linear(self, matrix: Matrix, bias: Tensor | None = None, *, norm: Norm | None = None) -> Linear:
        return self._packed(matrix, bias, norm, gated=False)

    def gated_linear(self, matrix: Matrix, *, norm: Norm | None = None) -> Linear:
        return self._packed(matrix, None, norm, gated=True)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self.kernels.rms_norm(x.contiguous(), norm.weight, norm.eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self.kernels.silu_and_mul(gate_up)

    def _packed(self, matrix: Matrix, bias: Tensor | None, norm: Norm | None, *, gated: bool) -> Linear:
        weight: Tensor | Quantized | None = matrix.blocks()
        if weight is None:
            weight = matrix.dense()
            if weight.dtype == torch.float16:
                weight = weight.float()
        if norm is None:
            return self.kernels.pack_linear(weight, bias, gated=gated, integer=self.integer)
        return self.kernels.pack_linear(weight, bias, norm.weight, norm.eps, gated=gated, integer=self.integer)


def _prepacked(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A product by oneDNN with weights in its own order: up to three times as fast for a few rows.

    Packed for 8 rows: that order is good at every number of rows, one packed for 512 is slow everywhere else.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, packed, bias, "none", [], "")


def computes_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones on `device`; elsewhere they are emulated."""
    if device.type != "cpu":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return _has("avx512_bf16") or _has("amx_tile")


def prefers_bfloat16(device: torch.device) -> bool:
    """Whether an engine on `device` is better off in bfloat16 than in float32.

    With vector instructions for it, a CPU is not: prompts gain a sixth, but decoding in bfloat16, which rounds where
    the models' reference implementations do, takes four times as long as our kernels in float32.
    """
    return computes_bfloat16(device) if device.type != "cpu" else _has("amx_tile")


def _has(instructions: str) -> bool:
    check = getattr(torch.cpu, f"_is_{instructions}_supported", None)
    return check is not None and bool(check())


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype of the activations of a model whose weights are in `dtype`."""
    if device.type != "cpu" or (dtype == torch.bfloat16 and computes_bfloat16(device)):
        return dtype
    return torch.float32

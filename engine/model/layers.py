"""The operations of a decoder layer: in torch for any device, and with the C++ kernels on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.library import Kernels

Linear = Callable[[Tensor], Tensor]
"""[rows, in_features] -> [rows, out_features]"""


_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class Ops(Protocol):
    """The operations whose implementation depends on the device. Activations are in `dtype`."""

    dtype: torch.dtype

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Lay out weight [out_features, in_features] for products with it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension; weight is float32."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * size] -> [rows, size]: silu(first half) * second half."""


class TorchOps:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        weight = weight.to(self.dtype)
        bias = None if bias is None else bias.to(self.dtype)
        if weight.device.type == "cpu" and self.dtype != torch.float16 and _ONEDNN:
            return _prepacked(weight, bias)
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class KernelOps(TorchOps):
    """Float32 products, of float32 or bfloat16 weights, by our own kernel; bfloat16 products stay with oneDNN."""

    def __init__(self, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(dtype)
        self.kernels = kernels
        self.rms_norm = kernels.rms_norm  # type: ignore[method-assign]
        self.silu_and_mul = kernels.silu_and_mul  # type: ignore[method-assign]

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self.dtype == torch.bfloat16:
            return super().linear(weight, bias)
        if weight.dtype == torch.float16:
            weight = weight.float()
        return self.kernels.pack_linear(weight, bias)


def _prepacked(weight: Tensor, bias: Tensor | None) -> Linear:
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
    checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(check is not None and bool(check()) for check in checks)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype of the activations of a model whose weights are in `dtype`."""
    if device.type != "cpu" or (dtype == torch.bfloat16 and computes_bfloat16(device)):
        return dtype
    return torch.float32

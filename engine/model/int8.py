"""Weights in at most 8 bits: as the file quantises them, or rounded to 8 bits here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.llama import head_name
from engine.model.quantized import Quantized

BLOCK = 32


def to_int8(
    config: ModelConfig, weights: Mapping[str, Tensor], quantized: Mapping[str, Quantized]
) -> tuple[dict[str, Tensor], dict[str, Quantized]]:
    """All weights and those that are quantised, of every matrix of the layers and the head.

    The weights rounded here are returned with the values they then have, so that all see the same model: what computes
    with plain floats, the embedding if it is the head, and the fingerprint.
    """
    weights, quantized = dict(weights), dict(quantized)
    for name in [name for name in weights if name.endswith("_proj.weight") or name == head_name(config)]:
        weight = weights[name]
        if name not in quantized and weight.shape[1] % BLOCK == 0:
            quantized[name], values = quantize(weight)
            weights[name] = values.to(weight.dtype)
    return weights, quantized


def quantize(weight: Tensor) -> tuple[Quantized, Tensor]:
    """A matrix in blocks of 8 bits, and its values in float32; of a length of rows that is a multiple of BLOCK.

    Scales are rounded to 8 bits, so that scale times value is exact.
    """
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).bfloat16().float()
    stored = (blocks / scales[..., None].clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    values = (stored * scales[..., None]).view(weight.shape)
    return Quantized(8, stored.to(torch.int8).view(torch.uint8).view(weight.shape), scales, None), values

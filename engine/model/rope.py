"""Rotary position embedding: the angles by which q and k are turned, and the turning."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.config import LinearRope, Llama3Rope, ModelConfig, TabledRope, YarnRope


class RotaryEmbedding:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies, self.attention_factor = rope_frequencies(config)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [tokens, head_dim / 2] float32."""
        angles = positions.float()[:, None] * self.frequencies
        if self.attention_factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [tokens, heads, head_dim]; rounded to its dtype at every operation, as
    the models' reference implementations do."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angle per position of each pair, [head_dim / 2] float32, and the factor on cos and sin."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
    base = 1.0 / (config.rope_theta ** (half / config.head_dim))
    match config.rope_scaling:
        case None:
            return base, 1.0
        case LinearRope(factor):
            return base / factor, 1.0
        case TabledRope(factors):
            return base / torch.tensor(factors), 1.0
        case Llama3Rope() as scaling:
            return _llama3(base, scaling), 1.0
        case YarnRope() as scaling:
            sharpening = scaling.attention_factor
            if sharpening is None:
                sharpening = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0
            return _yarn(base, scaling, config), sharpening


def _llama3(base: Tensor, scaling: Llama3Rope) -> Tensor:
    """Wavelengths that fit `high_freq_factor` times into the original context are kept, those that do not fit
    `low_freq_factor` times are stretched by the factor, those between are blended."""
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * base / scaling.factor + kept * base


def _yarn(base: Tensor, scaling: YarnRope, config: ModelConfig) -> Tensor:
    """Pairs that turn more than `beta_fast` times over the original context are kept, those that turn less than
    `beta_slow` times are stretched by the factor, with a linear ramp over the pairs between."""

    def pair_turning(times: float) -> float:
        length = scaling.original_max_position_embeddings
        return config.head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_turning(scaling.beta_slow)), config.head_dim - 1)
    ramp = (torch.arange(len(base), dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return stretched * base / scaling.factor + (1 - stretched) * base

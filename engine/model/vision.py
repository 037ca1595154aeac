"""The SigLIP tower of SmolVLM and Idefics3, and the connector that makes rows for the text model of its patches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.layers import Linear, TorchOps
from engine.model.quantized import Matrix
from engine.model.vision_config import VisionConfig

TILES_AT_ONCE = 4
"""A picture has up to dozens; the memory that a step takes for activations should not depend on it."""


class VisionTower:
    """The tower laid out for its device, and its forward pass. Keeps no reference to the weights it copies."""

    def __init__(
        self,
        config: VisionConfig,
        weights: Mapping[str, Tensor],
        levels: npt.NDArray[np.float32],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """levels: [channels, 256], what stands for each level of a channel; dtype: of activations."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self._ops = TorchOps(dtype)
        self._weights = {name: weights[name].to(device) for name, _ in config.weight_shapes()}
        self._levels = torch.from_numpy(levels).to(device)
        self._patches = self._linear("embeddings.patch_embedding")
        self._positions = self._weight("embeddings.position_embedding.weight").to(dtype)
        self._layers = [_Layer(self, f"encoder.layers.{index}") for index in range(config.num_layers)]
        self._last_norm = self._norm("post_layernorm")
        proj = self._weights["model.connector.modality_projection.proj.weight"]
        self._project = self._ops.linear(Matrix([proj], [None]))
        del self._weights

    def encode(self, tiles: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoding [rows, output_size] of a picture's tiles, uint8 [tiles, channels, height, width].

        mask: [tiles, height, width], of the pixels that are no padding.
        """
        parts = []
        for first in range(0, len(tiles), TILES_AT_ONCE):
            some = slice(first, first + TILES_AT_ONCE)
            parts.append(
                self._encode(tiles[some].to(self.device), None if mask is None else mask[some].to(self.device))
            )
        return torch.cat(parts)

    def _encode(self, tiles: Tensor, mask: Tensor | None) -> Tensor:
        side = self.config.patch_size
        channels = torch.arange(tiles.shape[1], device=self.device)[:, None, None]
        values = self._levels[channels, tiles.long()].to(self.dtype)
        # As a convolution whose windows do not overlap: each patch is one row.
        patches = values.unfold(2, side, side).unfold(3, side, side)  # [tiles, channels, high, wide, side, side]
        count, _, high, wide = patches.shape[:4]
        rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(count * high * wide, -1)
        if mask is None:
            seen = torch.ones(count, high, wide, dtype=torch.bool, device=self.device)
        else:
            seen = mask.bool().unfold(1, side, side).unfold(2, side, side).any(-1).any(-1)
        hidden = self._patches(rows).view(count, high * wide, -1) + self._positions[self._places(seen)]
        keys = None if mask is None or bool(seen.all()) else seen.view(count, 1, 1, -1)
        for layer in self._layers:
            hidden = layer.forward(hidden, keys)
        hidden = self._last_norm(hidden).view(count, high, wide, -1)
        return self._project(self._shuffled(hidden))

    def _places(self, seen: Tensor) -> Tensor:
        """[tiles, patches]: the position of each patch, on the grid of a square that is as large as what is seen."""
        side = self.config.patches_per_side
        edges = torch.arange(1 / side, 1.0, 1 / side, device=self.device)

        def bucket(num_seen: Tensor, count: int) -> Tensor:
            # In float32 and in this order: where a patch falls on an edge, rounding decides, as in the reference.
            steps = torch.arange(count, dtype=torch.float32, device=self.device)[None, :] * (1.0 / num_seen)[:, None]
            return torch.bucketize(steps.clamp(max=1.0 - 1e-6), edges, right=True)

        down = bucket(seen[:, :, 0].sum(dim=1), seen.shape[1])
        across = bucket(seen[:, 0, :].sum(dim=1), seen.shape[2])
        places = down[:, :, None] * side + across[:, None, :]
        return torch.where(seen, places, torch.zeros_like(places)).flatten(1)

    def _shuffled(self, hidden: Tensor) -> Tensor:
        """Squares of patches as one row each: [tiles, high, wide, size] -> [rows, size * scale_factor ** 2]."""
        scale = self.config.scale_factor
        count, high, wide, size = hidden.shape
        squares = hidden.view(count, high // scale, scale, wide // scale, scale, size)
        return squares.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * scale * scale)

    def _weight(self, name: str) -> Tensor:
        return self._weights[f"model.vision_model.{name}"]

    def _linear(self, *modules: str) -> Linear:
        weights = [self._weight(f"{module}.weight").flatten(1) for module in modules]
        bias = torch.cat([self._weight(f"{module}.bias") for module in modules])
        return self._ops.linear(Matrix(weights, [None] * len(weights)), bias)

    def _norm(self, module: str) -> _LayerNorm:
        weight, bias = (self._weight(f"{module}.{part}").to(self.dtype) for part in ("weight", "bias"))
        return _LayerNorm(weight, bias, self.config.layer_norm_eps)


class _LayerNorm:
    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class _Layer:
    def __init__(self, tower: VisionTower, prefix: str) -> None:
        self.num_heads = tower.config.num_heads
        self.norms = tower._norm(f"{prefix}.layer_norm1"), tower._norm(f"{prefix}.layer_norm2")
        self.qkv = tower._linear(*(f"{prefix}.self_attn.{name}_proj" for name in "qkv"))
        self.out = tower._linear(f"{prefix}.self_attn.out_proj")
        self.up, self.down = tower._linear(f"{prefix}.mlp.fc1"), tower._linear(f"{prefix}.mlp.fc2")

    def forward(self, hidden: Tensor, keys: Tensor | None) -> Tensor:
        """[tiles, patches, size] -> the same; keys: [tiles, 1, 1, patches], those that are attended to."""
        count, patches, size = hidden.shape
        before_attention, before_mlp = self.norms
        rows = hidden.view(-1, size)
        qkv = self.qkv(before_attention(rows)).view(count, patches, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=keys)
        rows = self.out(attended.transpose(1, 2).reshape(-1, size), rows)
        inner = F.gelu(self.up(before_mlp(rows)), approximate="tanh")
        return self.down(inner, rows).view(count, patches, size)

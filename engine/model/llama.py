"""Llama, Qwen2 and Qwen3: one decoder; they differ in a bias, and in a norm of q and k."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.attention.base import Attend, Attention, Step
from engine.model.config import ModelConfig
from engine.model.layers import Linear, Ops
from engine.model.rope import RotaryEmbedding


class Norm:
    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self.weight = weight.float()
        self.eps = eps
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class DecoderLayer:
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], index: int, ops: Ops) -> None:
        prefix = f"model.layers.{index}."

        def projection(*names: str) -> Linear:
            """One matrix product for projections of the same input."""
            biases = [weights[name] for part in names if (name := f"{prefix}{part}.bias") in weights]
            matrix = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
            return ops.linear(matrix, torch.cat(biases) if biases else None)

        def norm(name: str) -> Norm:
            return Norm(weights[f"{prefix}{name}.weight"], config.rms_norm_eps, ops)

        self.index = index
        self.head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim = config.head_dim
        self.input_norm = norm("input_layernorm")
        self.qkv_proj = projection("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qk_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None
        self.o_proj = projection("self_attn.o_proj")
        self.post_norm = norm("post_attention_layernorm")
        self.gate_up_proj = projection("mlp.gate_proj", "mlp.up_proj")
        self.silu_and_mul = ops.silu_and_mul
        self.down_proj = projection("mlp.down_proj")

    def forward(self, hidden: Tensor, attend: Attend, rows: Tensor | None) -> Tensor:
        """[tokens, hidden_size] -> the same, or only `rows` of it: attention needs every token, the rest does not."""
        qkv = self.qkv_proj(self.input_norm(hidden)).view(len(hidden), -1, self.head_dim)
        if self.qk_norms is not None:
            q, k, v = torch.split(qkv, self.head_counts, dim=1)
            q_norm, k_norm = self.qk_norms
            qkv = torch.cat((q_norm(q.contiguous()), k_norm(k.contiguous()), v), dim=1)
        attended = attend(self.index, qkv)
        if rows is not None:
            hidden, attended = hidden[rows], attended[rows]
        hidden = hidden + self.o_proj(attended)
        return hidden + self.down_proj(self.silu_and_mul(self.gate_up_proj(self.post_norm(hidden))))


class Llama:
    """The model laid out for its device, and its forward pass.

    Of the weights given only the embedding is kept; the matrices are copied into the order that `ops` wants.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], attention: Attention, ops: Ops) -> None:
        self.attention = attention
        self.dtype = ops.dtype
        self.embedding = weights["model.embed_tokens.weight"]
        self.rotary = RotaryEmbedding(config, self.embedding.device)
        self.layers = [DecoderLayer(config, weights, index, ops) for index in range(config.num_layers)]
        self.norm = Norm(weights["model.norm.weight"], config.rms_norm_eps, ops)
        self.lm_head = ops.linear(self.embedding if config.tie_word_embeddings else weights["lm_head.weight"], None)

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Store the KV of every token; return float32 logits [len(rows), vocab_size] of the tokens at `rows`."""
        hidden = self.embedding[token_ids].to(self.dtype)
        attend = self.attention.begin(step, *self.rotary(step.positions))
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, attend, None)
        hidden = self.layers[-1].forward(hidden, attend, rows)
        return self.lm_head(self.norm(hidden)).float()

"""Llama, Qwen2 and Qwen3: one decoder; they differ in a bias, and in a norm of q and k."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.attention.base import Attend, Attention, Step
from engine.model.config import ModelConfig
from engine.model.layers import Norm, Ops
from engine.model.rope import RotaryEmbedding


class DecoderLayer:
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], index: int, ops: Ops) -> None:
        prefix = f"model.layers.{index}."

        def stacked(*names: str) -> Tensor:
            """Rows of several projections of the same input, for one matrix product."""
            return torch.cat([weights[f"{prefix}{name}"] for name in names])

        def norm(name: str) -> Norm:
            return Norm(weights[f"{prefix}{name}.weight"].float(), config.rms_norm_eps)

        qkv = [f"self_attn.{part}_proj" for part in "qkv"]
        self.index = index
        self.head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim = config.head_dim
        self.rms_norm = ops.rms_norm
        self.qkv_proj = ops.linear(
            stacked(*(f"{part}.weight" for part in qkv)),
            stacked(*(f"{part}.bias" for part in qkv)) if config.attention_bias else None,
            norm=norm("input_layernorm"),
        )
        self.qk_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None
        self.o_proj = ops.linear(weights[f"{prefix}self_attn.o_proj.weight"])
        self.gate_up_proj = ops.gated_linear(
            stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"), norm=norm("post_attention_layernorm")
        )
        self.down_proj = ops.linear(weights[f"{prefix}mlp.down_proj.weight"])

    def forward(self, hidden: Tensor, attend: Attend, rows: Tensor | None) -> Tensor:
        """[tokens, hidden_size] -> the same, or only `rows` of it: attention needs every token, the rest does not."""
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        if self.qk_norms is not None:
            q, k, v = torch.split(qkv, self.head_counts, dim=1)
            q_norm, k_norm = self.qk_norms
            qkv = torch.cat((self.rms_norm(q, q_norm), self.rms_norm(k, k_norm), v), dim=1)
        attended = attend(self.index, qkv)
        if rows is not None:
            hidden, attended = hidden[rows], attended[rows]
        hidden = self.o_proj(attended, hidden)
        return self.down_proj(self.gate_up_proj(hidden), hidden)


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
        head = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self.lm_head = ops.linear(head, norm=Norm(weights["model.norm.weight"].float(), config.rms_norm_eps))

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Store the KV of every token; return float32 logits [len(rows), vocab_size] of the tokens at `rows`."""
        hidden = self.embedding[token_ids].to(self.dtype)
        attend = self.attention.begin(step, *self.rotary(step.positions))
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, attend, None)
        hidden = self.layers[-1].forward(hidden, attend, rows)
        return self.lm_head(hidden).float()

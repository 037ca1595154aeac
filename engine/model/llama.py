"""Llama, Qwen2 and Qwen3: one decoder; they differ in a bias, and in a norm of q and k."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.attention.base import Attend, Attention, Step
from engine.model.config import ModelConfig
from engine.model.layers import Norm, Ops
from engine.model.quantized import Matrix, Quantized
from engine.model.rope import RotaryEmbedding

DecodeLayers = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(hidden, cos, sin, slots, block_table, context_lens), of which hidden is changed."""


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        quantized: Mapping[str, Quantized],
        index: int,
        ops: Ops,
    ) -> None:
        prefix = f"model.layers.{index}."

        def matrix(*modules: str) -> Matrix:
            names = [f"{prefix}{module}.weight" for module in modules]
            return Matrix([weights[name] for name in names], [quantized.get(name) for name in names])

        def norm(name: str) -> Norm:
            return Norm(weights[f"{prefix}{name}.weight"].float(), config.rms_norm_eps)

        qkv = [f"self_attn.{part}_proj" for part in "qkv"]
        self.index = index
        self.head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim = config.head_dim
        self.rms_norm = ops.rms_norm
        self.qkv_proj = ops.linear(
            matrix(*qkv),
            torch.cat([weights[f"{prefix}{part}.bias"] for part in qkv]) if config.attention_bias else None,
            norm=norm("input_layernorm"),
        )
        self.qk_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None
        self.o_proj = ops.linear(matrix("self_attn.o_proj"))
        self.gate_up_proj = ops.gated_linear(
            matrix("mlp.gate_proj", "mlp.up_proj"), norm=norm("post_attention_layernorm")
        )
        self.down_proj = ops.linear(matrix("mlp.down_proj"))

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


def head_name(config: ModelConfig) -> str:
    """Of the weight that makes logits of the hidden state."""
    return "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


class Llama:
    """The model laid out for its device, and its forward pass.

    Of the weights given only the embedding is kept; the matrices are copied into the order that `ops` wants.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        attention: Attention,
        ops: Ops,
        quantized: Mapping[str, Quantized],
    ) -> None:
        self.attention = attention
        self.decode_layers: DecodeLayers | None = None
        """All layers at once, if there is a way, for steps of one token per sequence."""
        self.dtype = ops.dtype
        self.embedding = weights["model.embed_tokens.weight"]
        self.rotary = RotaryEmbedding(config, self.embedding.device)
        self.layers = [DecoderLayer(config, weights, quantized, index, ops) for index in range(config.num_layers)]
        head = head_name(config)
        self.lm_head = ops.linear(
            Matrix([weights[head]], [quantized.get(head)]),
            norm=Norm(weights["model.norm.weight"].float(), config.rms_norm_eps),
        )

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Store the KV of every token; return float32 logits [len(rows), vocab_size] of the tokens at `rows`."""
        return self.logits(self.hidden(token_ids, step, rows))

    def hidden(self, token_ids: Tensor, step: Step, rows: Tensor, given: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Store the KV of every token; return [len(rows), hidden_size], what `logits` makes logits of.

        given: of some tokens, their places and what stands in for their embeddings.
        """
        hidden = self.embedding[token_ids].to(self.dtype)
        if given is not None:
            places, embeddings = given
            hidden[places] = embeddings.to(self.dtype)
        cos, sin = self.rotary(step.positions)
        if self.decode_layers is not None and not step.prefills:
            self.decode_layers(hidden, cos, sin, step.slots, step.block_table, step.context_lens)
            return hidden[rows]
        attend = self.attention.begin(step, cos, sin)
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, attend, None)
        return self.layers[-1].forward(hidden, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()

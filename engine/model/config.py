"""What a model is made of, read from config.json or from the metadata of a GGUF file.

Strict: what the engine would compute wrongly (another architecture, activation, rope variant) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.model.errors import ModelError
from engine.model.fields import Fields

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NAMES = ", ".join(ARCHITECTURES)


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Long wavelengths stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN: as llama3, blended by dimension, and attention sharpened by `attention_factor` (None: from `factor`)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class TabledRope:
    """Each of the head_dim / 2 frequencies divided by its own factor, as GGUF files carry llama3's."""

    factors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | YarnRope | TabledRope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    """One of ARCHITECTURES."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding; a tokenizer may know fewer."""
    max_position_embeddings: int
    """Tokens the model was made for."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    """The embedding is the output matrix too; there is no lm_head.weight then."""
    attention_bias: bool
    """The q, k and v projections have a bias (never the output projection)."""
    qk_norm: bool
    """RMSNorm over each head of q and k, before rope."""

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight of the model, by its Hugging Face name, with its shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                yield f"{prefix}.self_attn.{name}_proj.weight", (size, hidden)
                if self.attention_bias:
                    yield f"{prefix}.self_attn.{name}_proj.bias", (size,)
            if self.qk_norm:
                yield f"{prefix}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{prefix}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
            yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)


def config_from_huggingface(fields: Fields) -> ModelConfig:
    """Read config.json, as transformers 4 or 5 writes it."""
    architecture = fields.text("model_type")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{fields.source}: model_type {architecture!r} is not supported (supported: {_NAMES})")
    if fields.get("quantization_config") is not None:
        raise ModelError(
            f"{fields.source}: quantization_config: quantised safetensors are not supported, use a GGUF file"
        )
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise ModelError(f"{fields.source}: hidden_act {activation!r} is not supported (supported: silu)")
    for key in ("attention_bias", "mlp_bias"):
        # A bias on the output or MLP projections, which no released model of these architectures has. qwen2's bias
        # on q, k and v is always there and not announced by a key.
        if fields.flag(key, False):
            raise ModelError(f"{fields.source}: {key} is not supported")
    _refuse_sliding_window(fields)

    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta_fields = rope if rope is not None and rope.get("rope_theta") is not None else fields
    return _checked(
        fields,
        ModelConfig(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", _head_dim(fields, "hidden_size", hidden_size, num_heads)),
            vocab_size=fields.integer("vocab_size"),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta_fields.number("rope_theta", 10000.0),
            rope_scaling=_rope_scaling(rope, fields.integer("max_position_embeddings")) if rope is not None else None,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
        ),
    )


def config_from_gguf(
    fields: Fields, *, vocab_size: int, tied: bool, rope_factors: tuple[float, ...] | None
) -> ModelConfig:
    """Read GGUF metadata.

    vocab_size: rows of its embedding; tied: it has no output matrix; rope_factors: its rope_freqs.weight, if any.
    """
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{fields.source}: architecture {architecture!r} is not supported (supported: {_NAMES})")

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if fields.get(key("expert_count")):
        raise ModelError(f"{fields.source}: {key('expert_count')}: mixture-of-experts models are not supported")
    hidden_size, num_heads = fields.integer(key("embedding_length")), fields.integer(key("attention.head_count"))
    head_dim = fields.integer(
        key("attention.key_length"), _head_dim(fields, key("embedding_length"), hidden_size, num_heads)
    )
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key(name), head_dim) != head_dim:
            raise ModelError(f"{fields.source}: {key(name)} other than the head size {head_dim} is not supported")
    context_length = fields.integer(key("context_length"))
    return _checked(
        fields,
        ModelConfig(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=fields.integer(key("feed_forward_length")),
            num_layers=fields.integer(key("block_count")),
            num_heads=num_heads,
            num_kv_heads=fields.integer(key("attention.head_count_kv"), num_heads),
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_position_embeddings=context_length,
            rms_norm_eps=_decimal(fields.number(key("attention.layer_norm_rms_epsilon"))),
            rope_theta=_decimal(fields.number(key("rope.freq_base"), 10000.0)),
            rope_scaling=_gguf_rope_scaling(fields, architecture, head_dim, context_length, rope_factors),
            tie_word_embeddings=tied,
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
        ),
    )


def _head_dim(fields: Fields, key: str, hidden_size: int, num_heads: int) -> int | None:
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _checked(fields: Fields, config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{fields.source}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"{fields.source}: an odd head size ({config.head_dim}) is not supported")
    return config


def _decimal(value: float) -> float:
    """The shortest decimal that is this 32-bit float: GGUF stores 1e-5 as 9.9999997e-06, config.json as 1e-5."""
    return float(str(np.float32(value)))


def _refuse_sliding_window(fields: Fields) -> None:
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list):
        other = next((kind for kind in layer_types if kind != "full_attention"), None)
        if other is not None:
            raise ModelError(f"{fields.source}: layer_types: {other!r} is not supported (supported: full_attention)")
    elif fields.flag("use_sliding_window", False):
        raise ModelError(f"{fields.source}: use_sliding_window is not supported")


def _rope_scaling(rope: Fields, max_position_embeddings: int) -> RopeScaling | None:
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{rope.source}: partial_rotary_factor is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRope(rope.number("factor"))
    if kind == "llama3":
        return Llama3Rope(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_position_embeddings),
        )
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim", "truncate"):
            if rope.get(key) is not None:
                raise ModelError(f"{rope.source}: {key} is not supported")
        return YarnRope(
            factor=rope.number("factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_position_embeddings),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=None if rope.get("attention_factor") is None else rope.number("attention_factor"),
        )
    raise ModelError(f"{rope.source}: rope type {kind!r} is not supported (supported: default, linear, llama3, yarn)")


def _gguf_rope_scaling(
    fields: Fields, architecture: str, head_dim: int, context_length: int, factors: tuple[float, ...] | None
) -> RopeScaling | None:
    prefix = f"{architecture}.rope.scaling"
    kind = fields.text(f"{prefix}.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{fields.source}: {prefix}.type {kind!r} is not supported (supported: none, linear, yarn)")
    if factors is not None:
        if kind != "none":
            raise ModelError(
                f"{fields.source}: rope_freqs.weight together with {prefix}.type {kind!r} is not supported"
            )
        if len(factors) != head_dim // 2 or not all(0 < factor < np.inf for factor in factors):
            raise ModelError(f"{fields.source}: rope_freqs.weight must be {head_dim // 2} positive numbers")
        return TabledRope(factors)
    if kind == "none":
        return None
    if fields.number(f"{prefix}.attn_factor", 1.0) != 1.0:
        raise ModelError(f"{fields.source}: {prefix}.attn_factor is not supported")
    factor = _decimal(fields.number(f"{prefix}.factor"))
    if kind == "linear":
        return LinearRope(factor)
    return YarnRope(factor, fields.integer(f"{prefix}.original_context_length", context_length))

"""config.json, read strictly: what would be computed wrongly is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.model.config import (
    LinearRope,
    Llama3Rope,
    ModelConfig,
    TabledRope,
    YarnRope,
    config_from_gguf,
    config_from_huggingface,
)
from engine.model.errors import ModelError
from engine.model.fields import Fields

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 4096,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
}


def parse(**changes: Any) -> ModelConfig:
    values = {key: value for key, value in (BASE | changes).items() if value is not ...}
    return config_from_huggingface(Fields("config.json", values))


def parse_gguf(changes: dict[str, Any], factors: tuple[float, ...] | None = None) -> ModelConfig:
    fields = Fields("m.gguf", {key: value for key, value in (GGUF | changes).items() if value is not ...})
    return config_from_gguf(fields, vocab_size=320, tied=False, rope_factors=factors)


def test_defaults_follow_from_what_is_given() -> None:
    config = parse(num_key_value_heads=...)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert config.rope_theta == 500000.0
    assert not config.tie_word_embeddings
    assert config.rope_scaling is None


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "qk_norm"),
    [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_architectures_differ_in_bias_and_norm(architecture: str, attention_bias: bool, qk_norm: bool) -> None:
    config = parse(model_type=architecture)
    assert (config.attention_bias, config.qk_norm) == (attention_bias, qk_norm)


def test_head_dim_is_free_of_the_hidden_size() -> None:
    assert parse(model_type="qwen3", head_dim=128).head_dim == 128


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_scaling_is_read_from_old_and_new_keys(key: str, type_key: str) -> None:
    llama3 = {
        type_key: "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert parse(**{key: llama3}).rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    assert parse(**{key: {type_key: "linear", "factor": 2}}).rope_scaling == LinearRope(2.0)
    assert parse(**{key: {type_key: "yarn", "factor": 4.0}}).rope_scaling == YarnRope(4.0, 4096)
    assert parse(**{key: {type_key: "default"}}).rope_scaling is None


def test_rope_theta_may_be_within_rope_parameters() -> None:
    config = parse(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported (supported: llama, qwen2, qwen3)"),
        ({"model_type": ...}, "model_type is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"hidden_size": True}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer, not -1"),
        ({"vocab_size": 1 << 60}, "vocab_size"),
        ({"num_attention_heads": 3}, "head_dim is missing"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 15}, "odd head size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": 4}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
    ],
)
def test_unusable_configurations_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as raised:
        parse(**changes)
    assert named in str(raised.value)
    assert "config.json" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_gguf_metadata_give_the_same_configuration() -> None:
    assert parse_gguf({}) == parse()


def test_gguf_rope_variants() -> None:
    assert parse_gguf(
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    ).rope_scaling == LinearRope(2.0)
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert parse_gguf(yarn | {"llama.rope.scaling.original_context_length": 1024}).rope_scaling == YarnRope(4.0, 1024)
    assert parse_gguf({}, factors=(1.0,) * 8).rope_scaling == TabledRope((1.0,) * 8)


@pytest.mark.parametrize(
    ("changes", "factors", "named"),
    [
        ({"general.architecture": "gemma3"}, None, "'gemma3' is not supported"),
        ({"general.architecture": ...}, None, "general.architecture is missing"),
        ({"llama.block_count": ...}, None, "llama.block_count is missing"),
        ({"llama.expert_count": 8}, None, "mixture-of-experts"),
        ({"llama.attention.value_length": 32}, None, "llama.attention.value_length"),
        ({"llama.rope.dimension_count": 8}, None, "llama.rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, None, "'longrope'"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, (1.0,) * 8, "rope_freqs.weight"),
        ({}, (1.0,) * 7, "8 positive numbers"),
        ({}, (0.0,) * 8, "8 positive numbers"),
        ({"llama.attention.head_count_kv": [2, 2]}, None, "head_count_kv must be a positive integer"),
    ],
)
def test_unusable_metadata_are_refused_by_name(
    changes: dict[str, Any], factors: tuple[float, ...] | None, named: str
) -> None:
    with pytest.raises(ModelError) as raised:
        parse_gguf(changes, factors)
    assert named in str(raised.value)
    assert "m.gguf" in str(raised.value)

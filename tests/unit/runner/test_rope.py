"""Rope frequencies against transformers, and the turning against complex numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.config import LinearRope, Llama3Rope, ModelConfig, RopeScaling, TabledRope, YarnRope
from engine.model.rope import RotaryEmbedding, rope_frequencies, rotate


def config(scaling: RopeScaling | None, *, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden_size=head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        vocab_size=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        rope_scaling=scaling,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=False,
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (LinearRope(3.0), {"rope_type": "linear", "factor": 3.0}),
        (
            Llama3Rope(8.0, 1.0, 4.0, 1024),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        ),
        (
            YarnRope(4.0, 2048),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        ),
        (
            YarnRope(4.0, 2048, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5,
            },
        ),
    ],
)
def test_frequencies_equal_transformers(scaling: RopeScaling, theirs: dict[str, object], head_dim: int) -> None:
    reference = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters=theirs | {"rope_theta": 50000.0},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[str(theirs["rope_type"])](reference, "cpu")
    ours, our_factor = rope_frequencies(config(scaling, head_dim=head_dim))
    torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)
    assert our_factor == pytest.approx(factor)


def test_tabled_factors_divide_the_frequencies() -> None:
    factors = tuple(1.0 + i for i in range(32))
    plain, _ = rope_frequencies(config(None))
    tabled, _ = rope_frequencies(config(TabledRope(factors)))
    torch.testing.assert_close(tabled * torch.tensor(factors), plain)


def test_rotation_is_by_the_angle_of_each_position() -> None:
    rotary = RotaryEmbedding(config(None), torch.device("cpu"))
    positions = torch.tensor([0, 1, 700, 8191])
    x = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *rotary(positions))
    angles = positions[:, None].double() * (50000.0 ** (-torch.arange(32).double() / 32))
    complex_x = torch.complex(x[..., :32].double(), x[..., 32:].double())
    expected = complex_x * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned[..., :32].double(), expected.real, atol=2e-3, rtol=0)
    torch.testing.assert_close(turned[..., 32:].double(), expected.imag, atol=2e-3, rtol=0)
    assert torch.equal(turned[0], x[0])

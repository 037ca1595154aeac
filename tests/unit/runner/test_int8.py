"""`quantization="int8"`: products in whole numbers against float32 on the same weights, and what becomes of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine.kernels.build import load_kernels
from engine.kernels.library import Kernels
from engine.kv_cache import KVCache, KVLayout
from engine.model.dequantize import as_stored
from engine.model.int8 import quantize
from engine.model.loader import LoadedModel, load_model
from engine.model.quantized import Quantized
from engine.runner import Runner
from tests.running import BLOCK_SIZE, Machine, random_tokens
from tests.tiny import make_tiny, make_tiny_gguf

KINDS = {"Q4_0": GGMLQuantizationType.Q4_0, "Q4_1": GGMLQuantizationType.Q4_1, "Q8_0": GGMLQuantizationType.Q8_0}
EXACT_ENOUGH = 1e-4
"""Largest difference from float32, as a share of the largest value, or of 1; inputs of 8 bits would differ by 1e-2."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = load_kernels()
    assert loaded is not None, "the tests need a C++ compiler"
    return loaded


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def stored_weight(kind: str, rows: int, features: int) -> Quantized:
    values = np.random.default_rng(rows).normal(size=(rows, features)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(values, KINDS[kind]).reshape(-1))
    stored = as_stored(raw, kind, (rows, features))
    assert stored is not None
    return stored


def assert_near(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=EXACT_ENOUGH * max(1.0, float(expected.abs().max())), rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 13, 97, 200])
@pytest.mark.parametrize(("features", "columns"), [(32, 1), (64, 64), (224, 100), (576, 7)])
def test_integer_product_is_near_that_in_float32(
    kernels: Kernels, rows: int, features: int, columns: int, kind: str
) -> None:
    x, residual = torch.randn(rows, features), torch.randn(rows, columns)
    bias, norm = torch.randn(columns), torch.randn(features)
    weight = stored_weight(kind, columns, features)
    exact = kernels.pack_linear(weight, bias, norm, 1e-5)(x, residual)
    ours = kernels.pack_linear(weight, bias, norm, 1e-5, integer=True)(x, residual)
    assert_near(ours, exact)
    assert not torch.equal(ours, exact), "this was the product in float32"
    weight, x = stored_weight(kind, 2 * columns, features), x / features**0.5  # for halves that do not enlarge errors
    exact = kernels.pack_linear(weight, gated=True)(x)
    assert_near(kernels.pack_linear(weight, gated=True, integer=True)(x), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_integer_product_does_not_overflow_at_the_extremes(kernels: Kernels, kind: str) -> None:
    """Every stored value and every input the largest there is, of either sign."""
    weight = stored_weight(kind, 4, 64)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        extreme = replace(weight, stored=torch.full_like(weight.stored, byte))
        for x in (torch.full((3, 64), 5e4), torch.full((3, 64), -5e4)):
            assert_near(kernels.pack_linear(extreme, integer=True)(x), kernels.pack_linear(extreme)(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_input_that_is_not_finite_shows_in_its_row_alone(kernels: Kernels, kind: str, value: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = value
    out = kernels.pack_linear(stored_weight(kind, 20, 64), integer=True)(x)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e20])
def test_inputs_of_any_size_are_scaled(kernels: Kernels, size: float) -> None:
    x, weight = torch.randn(2, 64) * size, stored_weight("Q4_1", 20, 64)
    exact = kernels.pack_linear(weight)(x)
    torch.testing.assert_close(
        kernels.pack_linear(weight, integer=True)(x), exact, atol=max(1e-4 * float(exact.abs().max()), 1e-28), rtol=0
    )


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_rows_of_a_batch_are_those_of_each_alone(kernels: Kernels, kind: str) -> None:
    x = torch.randn(97, 576)
    linear = kernels.pack_linear(stored_weight(kind, 100, 576), integer=True)
    alone = torch.cat([linear(x[row : row + 1]) for row in range(97)])
    for rows in (2, 7, 8, 97):
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_quantized_values_are_what_is_stored_and_near_the_weight() -> None:
    weight = torch.randn(30, 96)
    weight[3, 32:64] = 0.0
    quantized, values = quantize(weight)
    stored = quantized.stored.view(torch.int8).float().view(30, 3, 32)
    assert torch.equal((stored * quantized.scales[..., None]).view(30, 96), values)
    largest = weight.view(30, 3, 32).abs().amax(-1, keepdim=True)
    assert ((values - weight).view(30, 3, 32).abs() <= largest * 0.006).all()  # half a step, and the scale's rounding
    assert values.unique().numel() > 500


def machine(model: LoadedModel, dtype: torch.dtype = torch.float32, *, use_kernels: bool = True) -> Machine:
    config = model.config
    cache = KVCache(KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype), 16)
    return Machine(model, cache, Runner(model, cache, max_num_seqs=1, use_kernels=use_kernels), list(range(16)))


def logits(model: LoadedModel, dtype: torch.dtype = torch.float32, *, use_kernels: bool = True) -> list[Tensor]:
    """Of a prompt and of one token after it."""
    runs = machine(model, dtype, use_kernels=use_kernels)
    request = runs.request(random_tokens(70), room=2)
    found = [runs.prefill(request)]
    request.append(5)
    return [*found, runs.decode(request)[0]]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_model_rounded_to_int8_is_the_same_with_the_kernels_and_in_torch(
    architecture: str, tie: bool, tmp_path: Path
) -> None:
    make_tiny(tmp_path, architecture=architecture, tie_word_embeddings=tie)
    model = load_model(tmp_path, dtype=torch.float32, quantization="int8")
    assert {name for name in model.weights if name.endswith("_proj.weight")} < model.quantized.keys()
    fast, plain = logits(model), logits(model, use_kernels=False)
    for ours, expected in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3 * float(expected.abs().max()), rtol=0)
    exact = logits(load_model(tmp_path, dtype=torch.float32))[1]
    assert 1e-3 < float((plain[1] - exact).abs().max() / exact.abs().max()) < 0.1, "int8 is near, and not the same"


def test_runner_computes_in_whole_numbers_only_if_asked(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", quantization="Q4_1")
    model, plain = (load_model(path, dtype=torch.float32, quantization=how) for how in ("int8", None))
    assert model.fingerprint == plain.fingerprint, "the weights are the file's in both, so KV is exchangeable"
    ours, exact = logits(model)[1], logits(plain)[1]
    assert not torch.equal(ours, exact)
    torch.testing.assert_close(ours, exact, atol=5e-4 * float(exact.abs().max()), rtol=0)


def test_weights_of_other_values_have_another_fingerprint(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    rounded, plain = (load_model(tmp_path, dtype=torch.float32, quantization=how) for how in ("int8", None))
    assert rounded.fingerprint != plain.fingerprint


def test_bfloat16_model_keeps_its_kv_and_computes_the_same(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", quantization="Q4_1")
    model = load_model(path, dtype=torch.bfloat16, quantization="int8")
    runner = machine(model, torch.bfloat16).runner
    assert runner.cache.arena.dtype == torch.bfloat16
    assert runner.model.dtype == torch.float32
    exact = logits(load_model(path, dtype=torch.float32))[1]
    ours = logits(model, torch.bfloat16)[1]
    torch.testing.assert_close(ours, exact, atol=0.03 * float(exact.abs().max()), rtol=0)


def test_matrix_that_blocks_do_not_divide_stays_as_it_is(tmp_path: Path) -> None:
    make_tiny(tmp_path, num_heads=3, num_kv_heads=1, intermediate_size=72)  # rows of 48 and 72
    model = load_model(tmp_path, dtype=torch.float32, quantization="int8")
    assert not model.quantized
    assert torch.equal(logits(model)[1], logits(load_model(tmp_path, dtype=torch.float32))[1])

"""Logits against transformers on the same weights: every architecture, with the kernels and without."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.kv_cache import KVCache, KVLayout
from engine.model.layers import computes_bfloat16
from engine.model.loader import load_model
from engine.runner import Runner
from tests.running import (
    BLOCK_SIZE,
    Machine,
    last_token,
    make_machine,
    random_tokens,
    reference_logits,
    reference_model,
)
from tests.tiny import make_tiny, make_tiny_gguf

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 130, 300]
"""Prompt lengths around the edges of blocks (16) and of query blocks (128)."""
FLOAT32_TOLERANCE = 1e-5
"""Largest difference between float32 logits, as a share of the largest logit."""
BFLOAT16_MARGIN = 1.25
"""Our bfloat16 may be this much further from the float32 result than transformers' bfloat16 is."""
MODELS = [
    pytest.param({"architecture": "llama"}, id="llama"),
    pytest.param({"architecture": "llama", "tie_word_embeddings": True}, id="llama-tied"),
    pytest.param({"architecture": "llama", "num_heads": 6, "num_kv_heads": 2, "head_dim": 32}, id="llama-gqa3"),
    pytest.param({"architecture": "llama", "num_heads": 5, "num_kv_heads": 1, "head_dim": 64}, id="llama-mqa5"),
    pytest.param({"architecture": "qwen2"}, id="qwen2"),
    pytest.param({"architecture": "qwen2", "tie_word_embeddings": True, "head_dim": 32}, id="qwen2-tied"),
    pytest.param({"architecture": "qwen3"}, id="qwen3"),
    pytest.param({"architecture": "qwen3", "tie_word_embeddings": True, "head_dim": 128}, id="qwen3-tied"),
]


def native_machine(folder: Path, *, use_kernels: bool) -> Machine:
    """With activations in bfloat16, whether or not this CPU has such products."""
    loaded = load_model(folder, dtype=torch.bfloat16)
    config, dtype = loaded.config, torch.bfloat16
    cache = KVCache(KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype), 128)
    runner = Runner(loaded, cache, max_num_seqs=2, use_kernels=use_kernels, activations=dtype)
    return Machine(loaded, cache, runner, list(range(128)))


def assert_same_rounding(ours: Tensor, expected: Tensor, *, exact: bool) -> None:
    """Not exact: but for sums in another order, which may move a value by one step of bfloat16, and what follows it."""
    if exact and not computes_bfloat16(torch.device("cpu")):  # whose products depend on how many rows there are
        assert torch.equal(ours, expected)
    else:
        torch.testing.assert_close(ours, expected, atol=2**-6 * float(expected.abs().max()), rtol=0)


def assert_equal_float32(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=FLOAT32_TOLERANCE * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("tiny", MODELS)
def test_float32_logits_equal_transformers_at_every_length_and_through_decode(
    tiny: dict[str, object], use_kernels: bool, tmp_path: Path
) -> None:
    machine = make_machine(tmp_path, use_kernels=use_kernels, **tiny)
    model = reference_model(tmp_path, torch.float32)
    for length in LENGTHS:
        tokens = random_tokens(length + 6, seed=length)
        expected = reference_logits(model, tokens)
        request = machine.request(tokens[:length])
        assert_equal_float32(machine.prefill(request), expected[length - 1])
        for position in range(length, length + 6):
            request.append(tokens[position])
            assert_equal_float32(machine.decode(request)[0], expected[position])
        machine.free += request.block_ids


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_no_further_from_the_exact_logits_than_transformers(
    architecture: str, use_kernels: bool, tmp_path: Path
) -> None:
    machine = make_machine(
        tmp_path, dtype=torch.bfloat16, use_kernels=use_kernels, architecture=architecture, head_dim=32
    )
    exact_model = reference_model(tmp_path, torch.bfloat16).float()
    rounded_model = reference_model(tmp_path, torch.bfloat16)
    errors, expected = [], []
    # Of many prompts: which of two equally good roundings is closer for a single one is chance.
    for length, seed in itertools.product((5, 33, 200), range(8)):
        tokens = random_tokens(length + 1, seed=1000 * seed + length)
        exact, rounded = reference_logits(exact_model, tokens), reference_logits(rounded_model, tokens)
        request = machine.request(tokens[:-1])
        ours = [machine.prefill(request)]
        request.append(tokens[-1])
        ours.append(machine.decode(request)[0])
        machine.free += request.block_ids
        errors.append((torch.stack(ours) - exact[-2:]).abs().mean())
        expected.append((rounded[-2:] - exact[-2:]).abs().mean())
    error = torch.stack(errors).mean()
    assert 0 < error < BFLOAT16_MARGIN * torch.stack(expected).mean()


def test_bfloat16_activations_are_right_where_the_device_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of CPUs that compute bfloat16, except for oneDNN's packed weights, which only those CPUs can make."""
    monkeypatch.setattr("engine.model.layers.computes_bfloat16", lambda device: True)
    monkeypatch.setattr("engine.model.layers._ONEDNN", False)
    machine = make_machine(tmp_path, dtype=torch.bfloat16, architecture="qwen3", head_dim=32)
    assert machine.runner.model.dtype == torch.bfloat16
    exact_model = reference_model(tmp_path, torch.bfloat16).float()
    rounded_model = reference_model(tmp_path, torch.bfloat16)
    tokens = random_tokens(150)
    exact, rounded = reference_logits(exact_model, tokens), reference_logits(rounded_model, tokens)
    request = machine.request(tokens[:-1])
    machine.prefill(request)
    request.append(tokens[-1])
    error = (machine.decode(request)[0] - exact[-1]).abs().mean()
    assert error < 1.5 * (rounded[-1] - exact[-1]).abs().mean()


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_bfloat16_activations_give_the_bits_of_transformers_over_a_handoff(
    architecture: str, use_kernels: bool, tmp_path: Path
) -> None:
    """The prompt in one engine, in chunks too, the rest in another, alone and in a batch; chunks and company may change
    the order of sums, and so the last bit."""
    make_tiny(tmp_path, architecture=architecture, head_dim=32, num_heads=6, num_kv_heads=2)
    prefill, decode = (native_machine(tmp_path, use_kernels=use_kernels) for _ in range(2))
    model = reference_model(tmp_path, torch.bfloat16)
    model.set_attn_implementation("sdpa")  # what it does unless told otherwise
    company = prefill.request(random_tokens(50, seed=50))  # whose blocks then are no other request's
    decode.prefill(company)
    for length, chunk in ((2, None), (16, None), (33, None), (200, None), (200, 130), (300, 16)):
        tokens = random_tokens(length + 2, seed=length)
        expected = reference_logits(model, tokens)
        request = prefill.request(tokens[:length], room=2)
        exact = use_kernels and chunk is None
        assert_same_rounding(prefill.prefill(request, chunk), expected[length - 1], exact=exact)
        decode.cache.arena[request.block_ids] = prefill.cache.arena[request.block_ids]
        assert_same_rounding(decode.decode(request)[0], expected[length - 1], exact=exact)
        for position in (length, length + 1):
            request.append(tokens[position])
            assert_same_rounding(decode.decode(company, request)[1], expected[position], exact=False)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_rope_equals_transformers(scaling: dict[str, object], tmp_path: Path) -> None:
    plain = make_machine(tmp_path / "plain", head_dim=32)
    machine = make_machine(tmp_path / "scaled", head_dim=32, rope_scaling=scaling)
    tokens = random_tokens(400)
    expected = reference_logits(reference_model(tmp_path / "scaled", torch.float32), tokens)[-1]
    assert_equal_float32(machine.prefill(machine.request(tokens)), expected)
    assert (plain.prefill(plain.request(tokens)) - expected).abs().max() > 0.05


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "torch"])
def test_greedy_tokens_equal_transformers(use_kernels: bool, tmp_path: Path) -> None:
    machine = make_machine(tmp_path, use_kernels=use_kernels)
    model = reference_model(tmp_path, torch.float32)
    request = machine.request(random_tokens(20))
    machine.prefill(request)
    for _ in range(40):
        expected = int(reference_logits(model, request.token_ids)[-1].argmax())
        (token,) = machine.runner.run(Batch([last_token(request)])).token_ids
        assert token == expected
        request.append(token)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_kept_as_the_file_stores_them_change_no_bit(
    architecture: str, quantization: str, tmp_path: Path
) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture, quantization=quantization)
    loaded = load_model(path, dtype=torch.float32)
    assert loaded.quantized.keys() == {name for name, weight in loaded.weights.items() if weight.dim() == 2}
    assert not load_model(path, dtype=torch.bfloat16).quantized
    config = loaded.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, torch.float32)
    logits = []
    for model in (loaded, replace(loaded, quantized={})):
        cache = KVCache(layout, 8)
        machine = Machine(model, cache, Runner(model, cache, max_num_seqs=1), list(range(8)))
        request = machine.request(random_tokens(70), room=2)
        logits.append(machine.prefill(request))
        request.append(5)
        logits.append(machine.decode(request)[0])
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])

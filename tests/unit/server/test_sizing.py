"""How much memory the KV arena takes, and what is refused before any is taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import sizing
from engine.config import EngineConfig
from engine.errors import StartError
from engine.kv_cache import KVLayout
from engine.model.config import ModelConfig, config_from_huggingface
from engine.model.fields import Fields
from engine.sizing import Sizes, choose_device, choose_dtype, choose_sizes, choose_threads, free_memory

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_model: Path) -> ModelConfig:
    return config_from_huggingface(Fields.from_json(tiny_model / "config.json"))


def sizes(model: ModelConfig, **settings: Any) -> Sizes:
    config = EngineConfig(model="tiny", **settings)
    layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, torch.float32)
    return choose_sizes(config, model, layout, CPU)


def test_default_has_room_for_some_full_sequences(model: ModelConfig) -> None:
    assert sizes(model) == Sizes(4096, sizing.DEFAULT_SEQUENCES * 256)
    assert sizes(model, max_model_len=100) == Sizes(100, sizing.DEFAULT_SEQUENCES * 7)


def test_default_takes_a_quarter_of_free_memory_at_most(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    monkeypatch.setattr(sizing, "free_memory", lambda device: 4 * 300 * block_bytes)
    assert sizes(model).num_blocks == 300


def test_size_in_bytes_and_in_blocks(model: ModelConfig) -> None:
    assert sizes(model, kv_cache_memory_bytes=8192 * 1000 + 1).num_blocks == 1000
    assert sizes(model, num_gpu_blocks_override=300, kv_cache_memory_bytes=1).num_blocks == 300


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"max_model_len": 5000}, "--max-model-len 5000: the model was made for at most 4096 tokens"),
        ({"max_model_len": 1}, "at least 2 tokens"),
        ({"block_size": 5000}, "--block-size 5000"),
        ({"num_gpu_blocks_override": 3}, "room for 48 tokens, a sequence may have 4096"),
        ({"kv_cache_memory_bytes": 1000}, f"--kv-cache-memory-bytes to {256 * 8192} or more"),
        ({"num_gpu_blocks_override": 2**40}, "does not fit"),
    ],
)
def test_what_does_not_go_together(model: ModelConfig, settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(StartError) as caught:
        sizes(model, **settings)
    assert fragment in str(caught.value)


def test_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)
    assert free_memory(CPU) == 650_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) > 1_000_000


def test_threads_default_to_the_cores_of_this_process() -> None:
    assert choose_threads(EngineConfig(model="m")) == len(os.sched_getaffinity(0))
    assert choose_threads(EngineConfig(model="m", threads=3)) == 3


@pytest.mark.parametrize("has_vectors", [True, False])
@pytest.mark.parametrize(("has_amx", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_dtype_is_as_asked_or_what_suits_the_cpu(
    has_amx: bool, expected: torch.dtype, has_vectors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_vectors)
    assert choose_dtype(EngineConfig(model="m", dtype="bfloat16"), CPU) is torch.bfloat16
    assert choose_dtype(EngineConfig(model="m"), CPU) is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there() -> None:
    with pytest.raises(StartError, match="--device cpu"):
        choose_device(EngineConfig(model="m", device="cuda"))

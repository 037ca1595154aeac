"""Folders and files give the same weights, whatever they are stored as; the fingerprint tells models apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.gguf_file import GGUFFile
from engine.model.loader import LoadedModel, ModelError, fingerprint, load_model
from tests.tiny import make_tiny, make_tiny_gguf

ARCHITECTURES = ["llama", "qwen2", "qwen3"]


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, dtype=dtype)


def assert_equal_weights(one: LoadedModel, other: LoadedModel) -> None:
    assert list(one.weights) == list(other.weights)
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_folder_gives_every_tensor_of_the_file(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = make_tiny(tmp_path / "m", architecture=architecture, tie_word_embeddings=tied)
    loaded = load(folder)
    stored = load_file(folder / "model.safetensors")
    assert loaded.weights.keys() == stored.keys()
    assert all(torch.equal(loaded.weights[name], stored[name]) for name in stored)
    assert ("lm_head.weight" in loaded.weights) is not tied
    assert loaded.config.tie_word_embeddings is tied
    assert loaded.name == "m"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_in_float32_equals_the_folder(tmp_path: Path, architecture: str, tied: bool) -> None:
    """For llama this proves the un-permuting of q and k: the files differ in their order, the loaded rows do not."""
    path = make_tiny_gguf(tmp_path / "m.gguf", architecture=architecture, tie_word_embeddings=tied)
    from_file, from_folder = load(path), load(tmp_path / "m.hf")
    assert_equal_weights(from_file, from_folder)
    assert from_file.config == from_folder.config
    assert from_file.fingerprint == from_folder.fingerprint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_llama_files_are_reordered(tmp_path: Path, architecture: str) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", architecture=architecture)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    loaded = load(path).weights["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(loaded, torch.tensor(stored["blk.0.attn_q.weight"])) is (architecture != "llama")


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_files_give_what_the_reference_dequantises(tmp_path: Path, quantization: str) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", architecture="qwen3", quantization=quantization)
    loaded = load(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, gguf_name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
        ("model.layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ):
        tensor = stored[gguf_name]
        expected = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(loaded.weights[name], expected), name


def test_shards_equal_one_file(tmp_path: Path) -> None:
    one, three = make_tiny(tmp_path / "one"), make_tiny(tmp_path / "three", num_shards=3)
    assert not (three / "model.safetensors").exists()
    assert_equal_weights(load(one), load(three))
    assert load(one).fingerprint == load(three).fingerprint


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_in_the_dtype_asked_for(tmp_path: Path, stored: torch.dtype, asked: torch.dtype) -> None:
    folder = make_tiny(tmp_path / "m", dtype=stored)
    expected = load_file(folder / "model.safetensors")
    for name, weight in load(folder, asked).weights.items():
        assert weight.dtype == asked
        assert torch.equal(weight, expected[name].to(asked))


def test_weights_outlive_a_change_of_the_file(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    loaded = load(folder)
    before = {name: weight.clone() for name, weight in loaded.weights.items()}
    path = folder / "model.safetensors"
    with path.open("r+b") as file:  # in place: mapped pages would show it
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * (path.stat().st_size // 2))
    assert all(torch.equal(loaded.weights[name], weight) for name, weight in before.items())


def test_second_copy_of_a_tied_embedding_is_left_out(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", tie_word_embeddings=True)
    path = folder / "model.safetensors"
    weights = load_file(path)
    extra = {"lm_head.weight": torch.zeros(320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(weights | extra, path)
    assert load(folder).weights.keys() == weights.keys()


def test_fingerprint_is_that_of_the_model_not_of_the_load(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    first, second = load(folder), load(make_tiny(tmp_path / "copy"))
    assert len(first.fingerprint) == 16
    assert first.fingerprint == second.fingerprint


def test_fingerprint_changes_with_any_single_weight(tmp_path: Path) -> None:
    loaded = load(make_tiny(tmp_path / "m", architecture="qwen2"))
    seen = {loaded.fingerprint}
    for weight in loaded.weights.values():
        flat = weight.view(-1)
        for index in (0, len(flat) // 2, len(flat) - 1):
            before = flat[index].clone()
            flat[index] = torch.nextafter(before, torch.tensor(9.0))
            seen.add(fingerprint(loaded.config, loaded.weights))
            flat[index] = before
    assert len(seen) == 1 + 3 * len(loaded.weights)


def test_fingerprint_changes_with_dtype_config_and_row_order(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    loaded = load(folder)
    seen = {loaded.fingerprint, load(folder, torch.bfloat16).fingerprint, load(folder, torch.float16).fingerprint}
    seen.add(load(make_tiny(tmp_path / "theta", rope_theta=20000.0)).fingerprint)
    seen.add(load(make_tiny(tmp_path / "seed", seed=1)).fingerprint)
    swapped = dict(loaded.weights)
    swapped["lm_head.weight"] = loaded.weights["lm_head.weight"].flip(0)
    seen.add(fingerprint(loaded.config, swapped))
    assert len(seen) == 6


def test_name_is_the_file_name_unless_the_file_carries_a_usable_one(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "some-model.Q8_0.gguf")
    assert load(path).name == "tiny"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x04\0\0\0\0\0\0\0tiny", b"\x04\0\0\0\0\0\0\0ti y"))
    assert load(path).name == "some-model.Q8_0"


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(Path("~/m")).name == "m"


@pytest.mark.model
def test_real_file_equals_the_reference_dequantisation(smollm2_path: Path) -> None:
    loaded = load(smollm2_path)
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    config = loaded.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.tie_word_embeddings
    assert sum(weight.numel() for weight in loaded.weights.values()) == 134_515_008
    wanted = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    file = GGUFFile(smollm2_path)
    for stored_name, name in wanted.items():
        entry = file.tensors[stored_name]
        values = gguf.quants.dequantize(file.tensor_bytes(entry), gguf.GGMLQuantizationType[entry.kind])
        assert torch.equal(loaded.weights[name], torch.tensor(values).view(entry.shape)), name


def test_loading_imports_neither_transformers_nor_the_server(tiny_model: Path) -> None:
    program = (
        "import sys, torch; from engine.model.loader import load_model; "
        f"load_model({str(tiny_model)!r}, dtype=torch.float32).tokenizer.render_chat([]); "
        "print([name for name in ('transformers', 'aiohttp', 'nixl_cu12') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_leaves_the_number_of_threads_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load(tiny_model)
        with pytest.raises(ModelError):
            load(tmp_path)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

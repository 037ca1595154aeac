"""Whatever is wrong with a model is a ModelError of one line: quickly, and without following a corrupt length."""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.errors import ModelError
from engine.model.gguf_file import GGUFFile
from engine.model.loader import load_model
from tests.tiny import make_tiny, make_tiny_gguf


def refusal(path: Path) -> str:
    """What load_model says about `path`, after checking the manners of it."""
    with pytest.raises(ModelError) as raised:
        load_model(path, dtype=torch.float32)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good GGUF file."""
    return make_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", quantization="Q8_0").read_bytes()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of more than a gigabyte fails for the test's duration."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_missing_path(tmp_path: Path) -> None:
    assert "does not exist: give a GGUF file or a Hugging Face model folder" in refusal(tmp_path / "none")


def test_folder_without_a_model(tmp_path: Path) -> None:
    assert "has no config.json; it is not a Hugging Face model folder" in refusal(tmp_path)
    (tmp_path / "some.gguf").touch()
    assert "it holds some.gguf: give that file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_missing_part_of_a_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000])
def test_garbage_in_a_part_of_a_folder(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert name in refusal(folder)


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.999])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert "model.safetensors cannot be read" in refusal(folder)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_tensor_missing_misshapen_unknown_or_of_another_type(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(128, 65)}))
    assert f"tensor {name} has shape [128, 65], config.json asks for [128, 64]" in refusal(folder)
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(128, 64, dtype=torch.int8)}))
    assert f"tensor {name} has the unsupported type I8" in refusal(folder)
    change_weights(folder, lambda weights: weights.pop(name))
    assert f"tensor {name} is missing" in refusal(folder)
    change_weights(folder, lambda weights: weights.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(128)}))
    assert "tensor model.layers.0.mlp.up_proj.bias has no place in a llama model" in refusal(folder)


def test_untied_model_without_an_output_matrix(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    assert "lm_head.weight is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        ({"a": "../elsewhere.safetensors"}, "is not a file in this folder"),
        ({"a": "absent.safetensors"}, "absent.safetensors is missing"),
        ({"a": 1}, "weight_map must be an object of file names"),
        (None, "weight_map must be an object of file names"),
    ],
)
def test_bad_shard_index(tmp_path: Path, weight_map: dict[str, Any] | None, expected: str) -> None:
    folder = make_tiny(tmp_path / "model", num_shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert expected in refusal(folder)


def test_missing_shard(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)


def test_tokenizer_with_more_tokens_than_the_model(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["extra"] = 320
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "token ids up to 320, the model only 320" in refusal(folder)


def test_unreadable_path(tmp_path: Path) -> None:
    name = "x" * 300  # longer than a file name may be
    assert "cannot be read" in refusal(tmp_path / name) or "does not exist" in refusal(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"not a model at all", b"\0" * 4096])
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refusal(path)


def test_safetensors_file_instead_of_its_folder(folder: Path) -> None:
    assert "is not a GGUF file (a Hugging Face model is given by its folder)" in refusal(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("offset", "value", "expected"),
    [
        (4, struct.pack("<I", 1), "GGUF version 1 is not supported"),
        (4, struct.pack("<I", 99), "GGUF version 99 is not supported"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 62), "corrupt"),  # tensors
        (8, struct.pack("<Q", 0), "missing"),
        (16, struct.pack("<Q", 1 << 62), "corrupt"),  # metadata keys
        (16, struct.pack("<Q", 0), "corrupt"),
        (24, struct.pack("<Q", 1 << 63), "truncated or corrupt"),  # the first key's length
    ],
)
def test_wrong_header(
    tmp_path: Path, whole: bytes, little_memory: None, offset: int, value: bytes, expected: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:offset] + value + whole[offset + len(value) :])
    assert expected in refusal(path)


@pytest.mark.parametrize("kind", [gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT8, gguf.GGUFValueType.UINT64])
@pytest.mark.parametrize("count", [1 << 22, 1 << 40, 1 << 61, (1 << 64) - 1])
def test_array_with_a_wrong_count(tmp_path: Path, little_memory: None, kind: int, count: int) -> None:
    key = b"\x01\0\0\0\0\0\0\0a" + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, count)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + b"\0" * 100_000)
    started = time.monotonic()
    assert "corrupt" in refusal(path)
    assert time.monotonic() - started < 20


def test_truncated_at_any_place(tmp_path: Path, whole: bytes, little_memory: None) -> None:
    path = tmp_path / "m.gguf"
    generator = random.Random(0)
    header = 12_000
    sizes = [*range(64), *generator.sample(range(64, header), 150), *generator.sample(range(header, len(whole)), 50)]
    for size in [*sizes, len(whole) - 1]:
        path.write_bytes(whole[:size])
        refusal(path)


def test_damaged_headers_load_or_are_refused(tmp_path: Path, whole: bytes, little_memory: None) -> None:
    """Nothing but a ModelError may come of changed bytes, though not every one makes the file unusable."""
    path = tmp_path / "m.gguf"
    generator = random.Random(0)
    started = time.monotonic()
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(12_000)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            load_model(path, dtype=torch.float32)
        except ModelError:
            refused += 1
    assert refused > 100
    assert time.monotonic() - started < 60


def test_random_bytes_behind_the_magic(tmp_path: Path, little_memory: None) -> None:
    path = tmp_path / "m.gguf"
    generator = random.Random(0)
    for size in range(0, 2000, 20):
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + generator.randbytes(size))
        refusal(path)


def write_gguf(path: Path, change: Callable[[gguf.GGUFWriter], object]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_architecture_is_named(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1))
    assert "architecture 'gemma' is not supported (supported: llama, qwen2, qwen3)" in refusal(path)


def test_other_quantisation_is_named_with_its_tensor(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", num_heads=16, head_dim=16, quantization="Q5_0")
    message = refusal(tmp_path / "m.gguf")
    assert (
        "tensor token_embd.weight has the unsupported type Q5_0 (supported: Q4_0, Q4_1, Q8_0, F32, F16, BF16)"
        in message
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight", "tensor blk.1.ffn_up.weight is missing"),
        (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", "tensor 'blk.0.ffn_up.weight' appears twice"),
        (b"llama.context_length", b"llama.block_count\0\0\0", "llama.context_length is missing"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.xodel", "tokenizer.ggml.model is missing"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.xerges", "tokenizer.ggml.merges is missing"),
        (b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0other", "tokenizer.ggml.pre 'other' is not supported"),
        (b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0rwkv", "tokenizer.ggml.model 'rwkv' is not supported"),
        (b"\xc4\xa0 t", b"\xc4\xa0+t", "which is not a pair"),
        (b"\xc4\xa0 t", b"\xc4\xa1 !", "the tokenizer is inconsistent"),
    ],
)
def test_inconsistent_file(tmp_path: Path, whole: bytes, old: bytes, new: bytes, expected: str) -> None:
    assert old in whole
    path = tmp_path / "m.gguf"
    path.write_bytes(whole.replace(old, new, 1))
    assert expected in refusal(path)


def test_tensor_with_an_impossible_shape(tmp_path: Path, whole: bytes) -> None:
    name = b"blk.1.ffn_up.weight"
    at = whole.index(name) + len(name)
    (tmp_path / "m.gguf").write_bytes(whole[: at + 4] + struct.pack("<Q", 33) + whole[at + 12 :])
    assert "'blk.1.ffn_up.weight' of type Q8_0 has the impossible shape [128, 33]" in refusal(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(whole[: at + 4] + struct.pack("<Q", 32) + whole[at + 12 :])
    assert "blk.1.ffn_up.weight has shape [128, 32], its metadata ask for [128, 64]" in refusal(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(whole[: at + 4] + struct.pack("<Q", 1 << 50) + whole[at + 12 :])
    assert "ends beyond the file" in refusal(tmp_path / "m.gguf")


def test_split_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", lambda writer: writer.add_uint16("split.count", 2))
    assert "one part of a split model: join the parts with llama-gguf-split --merge" in refusal(path)


def test_container_reads_every_kind_of_metadata(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("u8", 200)
        writer.add_int8("i8", -3)
        writer.add_uint64("u64", 1 << 63)
        writer.add_float64("f64", 0.1)
        writer.add_bool("yes", True)
        writer.add_string("text", "é")
        writer.add_array("strings", ["a", "", "b c"])
        writer.add_array("numbers", [1, -2, 3])
        writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))

    file = GGUFFile(write_gguf(tmp_path / "m.gguf", fill))
    scalars = {key: file.metadata[key] for key in ("u8", "i8", "u64", "f64", "yes", "text", "strings")}
    assert scalars == {
        "u8": 200,
        "i8": -3,
        "u64": 1 << 63,
        "f64": 0.1,
        "yes": True,
        "text": "é",
        "strings": ["a", "", "b c"],
    }
    assert np.array_equal(np.asarray(file.metadata["numbers"]), [1, -2, 3])
    entry = file.tensors["t"]
    assert (entry.shape, entry.kind) == ((2, 3), "F32")
    assert file.tensor_bytes(entry).view(np.float32).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.model
def test_truncated_real_file_is_refused_quickly(tmp_path: Path, smollm2_path: Path) -> None:
    data = smollm2_path.read_bytes()
    path = tmp_path / "m.gguf"
    for size in (1000, 500_000, 1_900_000, 50_000_000, len(data) - 1):
        path.write_bytes(data[:size])
        started = time.monotonic()
        assert "truncated" in refusal(path)
        assert time.monotonic() - started < 20

"""A model from disk: its configuration, weights and tokenizer, and a fingerprint that names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.media.placement import IMAGE_TOKEN
from engine.media.settings import PictureSettings, settings_from_folder
from engine.model import gguf, safetensors
from engine.model.config import ModelConfig, config_from_huggingface
from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.model.gguf_file import GGUFFile
from engine.model.int8 import to_int8
from engine.model.quantized import Quantized
from engine.model.vision_config import VISION_MODELS, VisionConfig, configs_from_huggingface
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

__all__ = ["LoadedModel", "LoadedVision", "ModelError", "fingerprint", "load_model"]


Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True)
class LoadedVision:
    """The part of a model that makes encodings of pictures."""

    config: VisionConfig
    settings: PictureSettings
    weights: dict[str, Tensor]
    """By Hugging Face name, as those of the model."""
    fingerprint: bytes
    """16 bytes, equal in every process that loaded the same weights in the same dtype: encodings are exchangeable."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    config: ModelConfig
    weights: dict[str, Tensor]
    """By Hugging Face name, all of one dtype, on the CPU; q and k in the rotate-half order."""
    tokenizer: Tokenizer
    fingerprint: bytes
    """16 bytes, equal in every process that loaded the same weights in the same dtype: KV is exchangeable then."""
    quantized: dict[str, Quantized] = field(default_factory=dict)
    """The weights that equal, value for value, what the file holds in fewer bits: none unless they are float32. With
    `quantization`: every matrix, as the file holds it or rounded."""
    quantization: Quantization | None = None
    """int8: products are to be computed in whole numbers, where there are kernels for it."""
    vision: LoadedVision | None = None
    """None: the model takes no pictures."""


def load_model(
    path: str | Path, *, dtype: torch.dtype, quantization: Quantization | None = None, vision_only: bool = False
) -> LoadedModel:
    """Load a GGUF file or a Hugging Face folder. Raises ModelError for whatever is wrong with it.

    vision_only: of a model that takes pictures, no weights but those that see them.
    """
    path = Path(path).expanduser()
    try:
        with _one_thread():
            if path.is_dir():
                return _load_folder(path, dtype, quantization, vision_only)
            if path.is_file():
                return _load_gguf(path, dtype, quantization)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    raise ModelError(f"{path} does not exist: give a GGUF file or a Hugging Face model folder")


def fingerprint(config: ModelConfig | VisionConfig, weights: Mapping[str, Tensor]) -> bytes:
    """Every weight counts, at the speed of memory: of a matrix, the sums of its rows, taken as 64-bit integers."""
    digest = blake2b(repr(config).encode(), digest_size=16)
    for name in sorted(weights):
        weight = weights[name].contiguous()
        data = weight.view(torch.uint8)
        if data.dim() == 2 and data.shape[1] % 8 == 0:
            data = data.view(torch.int64).sum(dim=1)
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(data.numpy().data)
    return digest.digest()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is thousands of short operations. With more threads each waits for all of them, and engines that start
    together on the same cores wait for each other: a minute and a half instead of a second was measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _load_folder(folder: Path, dtype: torch.dtype, quantization: Quantization | None, vision_only: bool) -> LoadedModel:
    if not (folder / "config.json").is_file():
        held = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"it holds {held[0]}: give that file" if held else "it is not a Hugging Face model folder"
        raise ModelError(f"{folder} has no config.json; {hint}")
    fields = Fields.from_json(folder / "config.json")
    tokenizer = tokenizer_from_folder(folder)
    if fields.get("model_type") not in VISION_MODELS:
        config = config_from_huggingface(fields)
        weights = safetensors.read_weights(folder, config, dtype)
        return _loaded(folder.resolve().name, folder, config, tokenizer, weights, {}, quantization)
    config, vision = configs_from_huggingface(fields)
    settings = settings_from_folder(folder, vision)
    weights = safetensors.read_weights(folder, None if vision_only else config, dtype, vision)
    seeing = {name: weights.pop(name) for name, _ in vision.weight_shapes()}
    if tokenizer.token_id(IMAGE_TOKEN) != vision.image_token_id:
        raise ModelError(f"{folder}: image_token_id {vision.image_token_id} is not {IMAGE_TOKEN} in tokenizer.json")
    quantization = None if vision_only else quantization
    loaded = _loaded(folder.resolve().name, folder, config, tokenizer, weights, {}, quantization)
    return replace(loaded, vision=LoadedVision(vision, settings, seeing, fingerprint(vision, seeing)))


def _load_gguf(path: Path, dtype: torch.dtype, quantization: Quantization | None) -> LoadedModel:
    file = GGUFFile(path)
    config = gguf.read_config(file)
    tokenizer = tokenizer_from_gguf(file)
    weights = gguf.read_weights(file, config, dtype)
    quantized = gguf.read_quantized(file, config) if dtype == torch.float32 or quantization else {}
    return _loaded(_gguf_name(path, file), path, config, tokenizer, weights, quantized, quantization)


def _loaded(
    name: str,
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor],
    quantized: dict[str, Quantized],
    quantization: Quantization | None,
) -> LoadedModel:
    if tokenizer.max_token_id >= config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has token ids up to {tokenizer.max_token_id}, the model only {config.vocab_size}"
        )
    if quantization == "int8":
        weights, quantized = to_int8(config, weights, quantized)
    return LoadedModel(name, config, weights, tokenizer, fingerprint(config, weights), quantized, quantization)


def _gguf_name(path: Path, file: GGUFFile) -> str:
    """general.name where it can serve as a model name in an API; in many files it is a sentence."""
    name = file.metadata.get("general.name")
    return name if isinstance(name, str) and name and not any(map(str.isspace, name)) else path.stem

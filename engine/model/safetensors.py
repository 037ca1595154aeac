"""Weights from a Hugging Face folder: model.safetensors, or shards listed in model.safetensors.index.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.model.vision_config import VisionConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def read_weights(
    folder: Path, config: ModelConfig | None, dtype: torch.dtype, vision: VisionConfig | None = None
) -> dict[str, Tensor]:
    """Every weight of `config` and of `vision` as `dtype`. A tensor that is missing, misshapen, or of no known use is a
    ModelError. Without `config`, those of `vision` alone."""
    shapes = {} if config is None else dict(config.weight_shapes())
    name_of: Callable[[str], str] = str
    if vision is not None:
        shapes |= vision.weight_shapes()
        name_of = _name_beside_vision
    weights: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as opened:
                file: Any = opened  # the library is untyped
                for stored in file.keys():  # noqa: SIM118 (not a mapping)
                    name = name_of(stored)
                    if name in shapes:
                        weights[name] = _read(path, file, stored, shapes[name], dtype)
                    elif config is not None and not _ignorable(name, config):
                        raise ModelError(f"{path}: tensor {stored} has no place in a {config.architecture} model")
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {_one_line(error)}") from None
    missing = next((name for name in shapes if name not in weights), None)
    if missing is not None:
        raise ModelError(f"{folder}: tensor {missing} is missing")
    return {name: weights[name] for name in shapes}


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise ModelError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    fields = Fields.from_json(folder / INDEX)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        raise fields.wrong("weight_map", "an object of file names")
    names = sorted(set(weight_map.values()))
    outside = next((name for name in names if Path(name).name != name), None)
    if outside is not None:
        raise ModelError(f"{fields.source}: weight_map names {outside!r}, which is not a file in this folder")
    return [folder / name for name in names]


def _read(path: Path, file: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    described = file.get_slice(name)
    if described.get_dtype() not in _DTYPES:
        raise ModelError(
            f"{path}: tensor {name} has the unsupported type {described.get_dtype()} (supported: {', '.join(_DTYPES)})"
        )
    if (found := tuple(described.get_shape())) != shape:
        raise ModelError(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
    # A copy, always: the file is mapped, and would change under a running engine when somebody replaces it.
    weight: Tensor = file.get_tensor(name).to(dtype, copy=True)
    return weight


def _name_beside_vision(stored: str) -> str:
    """Of a text model's weight, what it is named in a model that is nothing else."""
    prefix = "model.text_model."
    return f"model.{stored.removeprefix(prefix)}" if stored.startswith(prefix) else stored


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tables older checkpoints carry along, and the second copy of a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

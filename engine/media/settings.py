"""How pictures are prepared for a model: what its folder says, and what a request may change of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.media.errors import SettingsError
from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.model.vision_config import VisionConfig

MAX_LONGEST_EDGE = 4096
"""Pixels. The reference implementation scales no picture to more."""
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


@dataclass(frozen=True, slots=True)
class PictureSettings:
    longest_edge: int | None
    """Pixels to which the longer side of a picture is scaled first; None: it stays as it is."""
    tile_size: int
    """Side of a tile, in pixels."""
    split: bool
    """Whether a picture larger than a tile is cut into several, beside the one that shows all of it."""
    resample: int
    """One of RESAMPLING."""
    rescale_factor: float | None
    """By which levels are multiplied; None: they are not."""
    mean: tuple[float, ...] | None
    """Per channel: subtracted, before the division by `std`; None: neither is done."""
    std: tuple[float, ...] | None
    rows_per_tile: int
    """Placeholders in the prompt for each tile."""

    @property
    def key(self) -> bytes:
        """Names them: pictures prepared alike have equal ones."""
        return repr(self).encode()

    def levels(self, num_channels: int) -> npt.NDArray[np.float32]:
        """[channels, 256]: what the model sees for each level of each channel."""
        levels = np.arange(256, dtype=np.float64)
        if self.rescale_factor is not None:
            levels = levels * self.rescale_factor
        table = np.broadcast_to(levels.astype(np.float32), (num_channels, 256))
        if self.mean is not None and self.std is not None:
            mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
            table = (table - mean) / std
        return np.ascontiguousarray(table, dtype=np.float32)

    def changed(self, wanted: Mapping[str, object]) -> PictureSettings:
        """With what a request's `mm_processor_kwargs` say. Raises SettingsError."""
        settings = self
        for name, value in wanted.items():
            if name == "do_image_splitting":
                if not isinstance(value, bool):
                    raise SettingsError(name, "true or false expected")
                settings = replace(settings, split=value)
            elif name == "size":
                settings = replace(settings, longest_edge=_longest_edge(value))
            else:
                raise SettingsError(name, "cannot be changed by a request (do_image_splitting and size can)")
        return settings


def settings_from_folder(folder: Path, vision: VisionConfig) -> PictureSettings:
    """Read preprocessor_config.json and processor_config.json, as transformers 4 or 5 writes them."""
    processor = _optional(folder / "processor_config.json")
    fields = processor.section("image_processor") or Fields.from_json(folder / "preprocessor_config.json")
    tile_size = _edge(fields, "max_image_size", 364)
    resample = fields.get("resample")
    resample = 1 if resample is None else resample
    if not isinstance(resample, int) or resample not in RESAMPLING:
        raise fields.wrong("resample", f"one of {', '.join(map(str, RESAMPLING))}")
    normalizes = fields.flag("do_normalize", True)
    settings = PictureSettings(
        longest_edge=_edge(fields, "size", 4 * 364) if fields.flag("do_resize", True) else None,
        tile_size=tile_size,
        split=fields.flag("do_image_splitting", True),
        resample=resample,
        rescale_factor=fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else None,
        mean=_channels(fields, "image_mean", vision) if normalizes else None,
        std=_channels(fields, "image_std", vision) if normalizes else None,
        rows_per_tile=processor.integer("image_seq_len", vision.rows_per_tile(tile_size)),
    )
    num_patches = tile_size // vision.patch_size  # what is left over at the edges is not seen
    if not num_patches or num_patches % vision.scale_factor:
        raise ModelError(
            f"{fields.source}: max_image_size {tile_size} has {num_patches} patches of {vision.patch_size} pixels in a "
            f"row, which must be a multiple of {vision.scale_factor}"
        )
    if settings.rows_per_tile != vision.rows_per_tile(tile_size):
        raise ModelError(
            f"{processor.source}: image_seq_len is {settings.rows_per_tile}, the model makes "
            f"{vision.rows_per_tile(tile_size)} rows of a tile"
        )
    return settings


def _optional(path: Path) -> Fields:
    return Fields.from_json(path) if path.is_file() else Fields(str(path), {})


def _edge(fields: Fields, key: str, default: int) -> int:
    section = fields.section(key)
    if section is None:
        return default
    edge = section.integer("longest_edge")
    if edge > MAX_LONGEST_EDGE:
        raise ModelError(f"{section.source}: longest_edge {edge} is more than {MAX_LONGEST_EDGE}")
    return edge


def _channels(fields: Fields, key: str, vision: VisionConfig) -> tuple[float, ...]:
    values = fields.get(key)
    if values is None:
        return (0.5,) * vision.num_channels
    if (
        not isinstance(values, list)
        or len(values) != vision.num_channels
        or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    ):
        raise fields.wrong(key, f"a list of {vision.num_channels} numbers")
    if key == "image_std" and not all(value > 0 for value in values):
        raise fields.wrong(key, "a list of positive numbers")
    return tuple(float(value) for value in values)


def _longest_edge(value: object) -> int:
    edge = value.get("longest_edge") if isinstance(value, Mapping) and len(value) == 1 else None
    if not isinstance(edge, int) or isinstance(edge, bool) or not 1 <= edge <= MAX_LONGEST_EDGE:
        raise SettingsError("size", f'{{"longest_edge": N}} expected, N from 1 to {MAX_LONGEST_EDGE}')
    return edge

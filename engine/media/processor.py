"""Pictures prepared for the model: named, laid out and cut into tiles. Work for a thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256

import torch

from engine.media.embeds import read_embeds
from engine.media.errors import MediaError, TooLarge
from engine.media.picture import cut, decode, grid, identifier
from engine.media.placement import Layout, Picture, read_layout
from engine.media.settings import PictureSettings
from engine.model.loader import LoadedVision
from engine.model.vision_config import VisionConfig

_MAX_NAME = 128
_Key = tuple[bytes, PictureSettings]


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    max_pixels: int
    max_rows: int
    """Placeholders for one picture: a prompt has no room for more."""
    cache_bytes: int
    """Of prepared pictures that are kept."""


class Processor:
    """Keeps no reference to the weights. May be used by several threads."""

    def __init__(self, vision: LoadedVision, limits: ProcessorLimits) -> None:
        self.settings: PictureSettings = vision.settings
        self.config: VisionConfig = vision.config
        self._fingerprint = vision.fingerprint
        self._limits = limits
        self._kept: OrderedDict[_Key, Picture] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def picture(self, data: bytes, settings: PictureSettings) -> Picture:
        """Of a file's bytes. Raises MediaError."""
        key = sha256(data).digest(), settings
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        image = decode(data, max_pixels=self._limits.max_pixels)
        name = identifier(image, settings, self._fingerprint)
        layout = self._fitting(Layout(*grid(image, settings), settings.rows_per_tile))
        made = Picture(name, layout, torch.from_numpy(cut(image, settings)))
        self._keep(key, made)
        return made

    def embeds(self, data: bytes, metadata: Mapping[str, object] | None) -> Picture:
        """Of an encoding that a client brought; metadata: how the picture was cut, if it was. Raises MediaError."""
        per_tile = self.settings.rows_per_tile
        layout = self._fitting(Layout(0, 0, per_tile) if metadata is None else read_layout(metadata, per_tile))
        rows = read_embeds(data, width=self.config.output_size, max_rows=layout.num_rows)
        if len(rows) != layout.num_rows:
            raise MediaError(f"{layout.num_rows} rows expected for this layout, got {len(rows)}")
        digest = blake2b(f"embeds {rows.dtype} {layout.rows}x{layout.cols} ".encode(), digest_size=16)
        digest.update(rows.view(torch.uint8).numpy().data)
        return Picture(digest.hexdigest(), layout, rows)

    def named(self, name: str, metadata: Mapping[str, object]) -> Picture:
        """Of an encoding that is known by name alone, made elsewhere. Raises MediaError."""
        if not 0 < len(name) <= _MAX_NAME:
            raise MediaError(f"uuid: 1 to {_MAX_NAME} characters expected")
        return Picture(name, self._fitting(read_layout(metadata, self.settings.rows_per_tile)), None)

    def _fitting(self, layout: Layout) -> Layout:
        if layout.num_rows > self._limits.max_rows:
            raise TooLarge(layout.num_rows)
        return layout

    def _keep(self, key: _Key, picture: Picture) -> None:
        size = 0 if picture.pixels is None else picture.pixels.nbytes
        with self._lock:
            if key in self._kept or size > self._limits.cache_bytes:
                return
            self._kept[key] = picture
            self._kept_bytes += size
            while self._kept_bytes > self._limits.cache_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= 0 if oldest.pixels is None else oldest.pixels.nbytes

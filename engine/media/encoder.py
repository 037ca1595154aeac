"""Encodings on their way: from pictures into the arena, and from there into the steps that read them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engine.batch import ScheduledRequest
from engine.media.arena import EncoderArena
from engine.media.item import MediaItem
from engine.model.loader import LoadedVision
from engine.model.vision import VisionTower


class Encoder:
    """The vision tower and the arena it writes. Keeps no reference to the weights of `vision`."""

    def __init__(self, vision: LoadedVision, arena: EncoderArena, *, activations: torch.dtype) -> None:
        """activations: their dtype in the tower."""
        self.arena = arena
        self.tower = VisionTower(
            vision.config,
            vision.weights,
            vision.settings.levels(vision.config.num_channels),
            dtype=activations,
            device=arena.tensor.device,
        )

    @torch.inference_mode()
    def encode(self, items: Iterable[MediaItem], encodings: Mapping[str, Sequence[int]]) -> None:
        """Write the encodings of these pictures into the blocks that `encodings` names."""
        for item in items:
            assert item.pixels is not None, f"nothing to encode of {item.identifier}"
            rows = item.pixels if item.pixels.dim() == 2 else self.tower.encode(item.pixels, item.pixel_mask)
            assert len(rows) == item.num_rows, f"{len(rows)} rows for {item.num_rows} placeholders"
            self.arena.write(encodings[item.identifier], rows)

    def rows(
        self, scheduled: Sequence[ScheduledRequest], starts: Sequence[int], encodings: Mapping[str, Sequence[int]]
    ) -> tuple[list[int], Tensor] | None:
        """What stands in for placeholders among the tokens of a step: their places in it, and a row for each. None if
        there are none. `starts` are the places of each request's first token."""
        places: list[int] = []
        found: list[Tensor] = []
        for each, start in zip(scheduled, starts, strict=True):
            first, stop = each.num_computed, each.num_computed + each.num_tokens
            for item in each.request.media:
                lo, hi = bisect_left(item.positions, first), bisect_left(item.positions, stop)
                if lo < hi:
                    places += (start + position - first for position in item.positions[lo:hi])
                    found.append(self.arena.read(encodings[item.identifier], lo, hi - lo))
        return (places, torch.cat(found)) if found else None

"""Where pictures stand in a prompt: the text in a picture's place, and those of its tokens that are placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.media.errors import MediaError
from engine.media.item import MediaItem

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_TOKEN = "<image>"
FAKE_TOKEN = "<fake_token_around_image>"
GLOBAL_TOKEN = "<global-img>"
MAX_PARTS_PER_SIDE = 128
"""More than the largest picture has of the smallest tiles."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a picture was cut."""

    rows: int
    """Of parts; 0 if there are none and all of the picture is its only tile."""
    cols: int
    rows_per_tile: int

    @property
    def num_rows(self) -> int:
        """Of the encoding."""
        return (self.rows * self.cols + 1) * self.rows_per_tile

    @property
    def text(self) -> str:
        """What stands in the prompt for the picture: its parts, a line for each row of them, then all of it."""
        tile = IMAGE_TOKEN * self.rows_per_tile
        whole = f"{FAKE_TOKEN}{GLOBAL_TOKEN}{tile}{FAKE_TOKEN}"
        if not self.rows:
            return whole
        lines = [
            "".join(f"{FAKE_TOKEN}<row_{row}_col_{col}>{tile}" for col in range(1, self.cols + 1))
            for row in range(1, self.rows + 1)
        ]
        return "\n".join([*lines, "", whole])

    @property
    def metadata(self) -> Mapping[str, int]:
        """What an engine needs that does not see the picture."""
        return {"rows": self.rows, "cols": self.cols}


def read_layout(metadata: Mapping[str, object], rows_per_tile: int) -> Layout:
    """As `Layout.metadata` has it. Raises MediaError."""
    if metadata.keys() != {"rows", "cols"}:
        raise MediaError('{"rows": …, "cols": …} expected')
    rows, cols = (_count(metadata[name], name) for name in ("rows", "cols"))
    if bool(rows) != bool(cols):
        raise MediaError("rows and cols are both 0, or neither is")
    return Layout(rows, cols, rows_per_tile)


def _count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PARTS_PER_SIDE:
        raise MediaError(f"{name}: a number from 0 to {MAX_PARTS_PER_SIDE} expected")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture of a request, prepared; not yet in its place."""

    identifier: str
    layout: Layout
    pixels: Tensor | None
    """As MediaItem.pixels."""


def place(token_ids: Sequence[int], pictures: Sequence[Picture], image_token_id: int) -> list[MediaItem]:
    """The pictures with their placeholders. Raises MediaError if there are others in the prompt, or too few."""
    positions = [place for place, token in enumerate(token_ids) if token == image_token_id]
    expected = sum(picture.layout.num_rows for picture in pictures)
    if len(positions) != expected:
        raise MediaError(f"the prompt has {len(positions)} placeholders for pictures that take {expected}")
    items = []
    start = 0
    for picture in pictures:
        stop = start + picture.layout.num_rows
        items.append(
            MediaItem(picture.identifier, tuple(positions[start:stop]), picture.layout.metadata, picture.pixels)
        )
        start = stop
    return items

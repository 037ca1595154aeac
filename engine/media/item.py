"""A picture in a prompt: where its placeholders stand, and by what name its encoding is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # requests are scheduled without torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One appearance of a picture in a request; a picture that appears twice is two items with one identifier."""

    identifier: str
    """Hex digest of the pixels, of how they are prepared and of the model: equal names mean equal encodings."""
    positions: Sequence[int]
    """Of its placeholder tokens in the prompt, ascending: the encoding's rows stand in for them, one for one."""
    metadata: Mapping[str, Any]
    """Small JSON values that tell how its placeholders are laid out, for engines that do not see the picture."""
    pixels: Tensor | None = None
    """What is to be encoded: tiles of the picture, uint8 [tiles, channels, height, width]; or, of a client that brought
    it, the encoding itself, [num_rows, hidden_size]. None if only the encoding's name is known."""
    pixel_mask: Tensor | None = None
    """[tiles, height, width], of what is no padding; None: all of it."""
    modality: Literal["image"] = "image"

    @property
    def num_rows(self) -> int:
        """Of its encoding, [num_rows, hidden_size]."""
        return len(self.positions)

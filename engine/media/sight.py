"""What an engine is served with whose model takes pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.media.fetch import Fetcher

if TYPE_CHECKING:  # the server is up before torch and Pillow are there
    from engine.media.processor import Processor


@dataclass(frozen=True, slots=True)
class Sight:
    processor: Processor
    fetcher: Fetcher
    max_pictures: int
    """In one request."""
    max_bytes: int
    """Of one picture, as a file."""
    takes_embeds: bool
    """Whether clients may send encodings."""

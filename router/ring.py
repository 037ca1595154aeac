"""Engines on a circle, by which prompts that begin alike find one of very many (Karger et al., "Consistent Hashing and
Random Trees", 1997)."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, Generic, TypeVar

CIRCLE: Final = 1 << 64
_POINTS: Final = struct.Struct("<8Q")
_DIGESTS: Final = 8
"""Of an engine's URL: 64 points on the circle, so that each gets about as much of it as another."""

T = TypeVar("T")


class Ring(Generic[T]):
    def __init__(self) -> None:
        self._points: list[int] = []
        """Ascending."""
        self._engines: list[T] = []
        """Who is at each."""

    def add(self, url: str, engine: T) -> None:
        for point in points_of(url):
            at = bisect_left(self._points, point)
            self._points.insert(at, point)
            self._engines.insert(at, engine)

    def remove(self, url: str) -> None:
        for point in points_of(url):  # of another with the same point, one in 2^64, one is as good as the other
            at = bisect_left(self._points, point)
            del self._points[at]
            del self._engines[at]

    def after(self, start: int) -> Iterator[tuple[int, T]]:
        """How far they are from here, and who: once around, so each is met at each of its points."""
        points, engines = self._points, self._engines
        first = bisect_left(points, start)
        for at in range(first, len(points)):
            yield points[at] - start, engines[at]
        for at in range(first):
            yield points[at] - start + CIRCLE, engines[at]


def points_of(url: str) -> Iterator[int]:
    for number in range(_DIGESTS):
        yield from _POINTS.unpack(blake2b(url.encode(), digest_size=_POINTS.size, salt=bytes([number])).digest())

"""What a picture's file is made of, counted before a decoder goes through it.

Pixels are not all that a file of a few bytes can cost: decoders go through each of millions of empty parts in Python,
join comments piece by piece, and look at the whole picture again for each scan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from engine.media.errors import MediaError

LIMITS = {"parts": 1 << 14, "scans": 64, "blocks": 1 << 17, "comment blocks": 1 << 10}
"""Many times what cameras and programs write. Blocks are those of a GIF, with 255 bytes at most."""
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""Any but those within a scan, which are restarts and bytes that only look like one."""
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA
_GIF_END, _GIF_EXTENSION, _GIF_IMAGE = b";!,"

Walk = Callable[[bytes], Iterator[tuple[str, int]]]
"""Tells of what there is how much, as it comes across it."""


def check_outline(data: bytes) -> None:
    """Raises MediaError for a file that has too much of something."""
    walk = next((walk for magic, walk in _WALKS.items() if data.startswith(magic)), None)
    seen: Counter[str] = Counter()
    for name, count in walk(data) if walk else ():
        seen[name] += count
        if seen[name] > LIMITS[name]:
            raise MediaError(f"the picture's file has more than {LIMITS[name]} {name}")


def _png(data: bytes) -> Iterator[tuple[str, int]]:
    at = 8
    while at < len(data) and data[at + 4 : at + 8] != b"IEND":
        yield "parts", 1
        at += 12 + int.from_bytes(data[at : at + 4])


def _jpeg(data: bytes) -> Iterator[tuple[str, int]]:
    at, scanned = 2, False
    while (found := _JPEG_MARKER.search(data, at)) is not None:
        # Before the first scan, what is between two parts is gone through byte by byte.
        yield "parts", 1 if scanned else 1 + found.start() - at
        marker, at = found[0][1], found.end()
        if marker == _END_OF_IMAGE:
            return
        if marker == _START_OF_SCAN:
            scanned = True
            yield "scans", 1
        at += int.from_bytes(data[at : at + 2])


def _gif(data: bytes) -> Iterator[tuple[str, int]]:
    """Up to the second image, which makes it one that is animated."""
    at, num_images = 13 + _gif_table(data[10:11]), 0
    while at < len(data) and data[at] != _GIF_END:
        kind = data[at]
        if kind == _GIF_IMAGE:
            if num_images:
                return
            num_images, name = 1, "blocks"
            at += 11 + _gif_table(data[at + 9 : at + 10])
        elif kind == _GIF_EXTENSION:
            name = "comment blocks"
            at += 2
        else:
            yield "blocks", 1
            at += 1
            continue
        while at < len(data):
            size = data[at]
            yield name, 1
            at += 1 + size
            if not size:
                break


def _gif_table(flags: bytes) -> int:
    """Bytes of the table of colours that follows."""
    return 6 << (flags[0] & 7) if flags and flags[0] & 0x80 else 0


_WALKS: dict[bytes, Walk] = {b"\x89PNG\r\n\x1a\n": _png, b"\xff\xd8": _jpeg, b"GIF8": _gif}

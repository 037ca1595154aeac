"""Server-sent events: a parser that follows the bytes as they arrive, and the one way to write an event.

The parser never changes what it is given: the `raw` of its events, and what `close()` returns, are the input, byte
for byte. So a proxy can look into a stream and still pass it on as it came.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

import orjson

DONE: Final = b"[DONE]"
DONE_EVENT: Final = b"data: [DONE]\n\n"

# A blank line: two line ends in a row, each CRLF, LF or CR. Where events begin and end must not depend on how the
# stream is cut into reads, and no event is to wait for the next. So a CR after a CRLF, which is surely half of another,
# waits for the byte after it; after any other line end it ends the event, and an LF that follows it begins the next
# one, as one more line without a field.
_EVENT_END = re.compile(rb"\r\n(?:\r\n|\n|\r(?=[^\n]))|(?:(?<!\r)\n|\r(?!\n))[\r\n]")
_LONGEST_END: Final = 4
_BOM: Final = b"\xef\xbb\xbf"


class SSEError(ValueError):
    """The stream is not one we can follow."""


class SSEEvent(NamedTuple):
    raw: bytes
    """As received, the blank line that ends it included."""
    data: bytes | None
    """The data lines, joined by LF; None if there is none (comments, keep-alives)."""


class SSEParser:
    """Cuts a byte stream, split anywhere, into events.

    Holds at most one unfinished event, of at most `max_event_bytes`.
    """

    def __init__(self, *, max_event_bytes: int = 16 << 20) -> None:
        self._max = max_event_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._begun = False

    def feed(self, chunk: bytes) -> list[SSEEvent]:
        """The events that end in this chunk. Raises SSEError if one grows beyond the bound."""
        buffer = self._buffer
        if not buffer and chunk.endswith(b"\n\n") and b"\r" not in chunk and not chunk.startswith(_BOM):
            # Whole events with ends of the usual kind, as most are.
            self._begun = True
            return [SSEEvent(text + b"\n\n", data_of(text)) for text in chunk.split(b"\n\n")[:-1]]
        buffer += chunk
        events: list[SSEEvent] = []
        while end := _EVENT_END.search(buffer, self._searched):
            raw = bytes(buffer[: end.end()])
            del buffer[: end.end()]  # cheap: a bytearray only moves its start
            events.append(SSEEvent(raw, data_of(raw) if self._begun else data_of(raw.removeprefix(_BOM))))
            self._begun = True
            self._searched = 0
        if len(buffer) > self._max:
            raise SSEError(f"an event is longer than {self._max} bytes")
        self._searched = max(0, len(buffer) - _LONGEST_END)
        return events

    def skip(self, chunk: bytes) -> int:
        """Take a chunk for fed if it is made of whole events, each of one line of data, as most are: how many; else 0,
        and it is still to be fed."""
        num_events = chunk.count(b"\n\n")
        if (
            self._buffer
            or chunk.count(b"\n") != 2 * num_events
            or not chunk.startswith(b"data: ")
            or not chunk.endswith(b"\n\n")
            or chunk.count(b"\n\ndata: ") != num_events - 1
            or b"\r" in chunk
        ):
            return 0
        self._begun = True
        return num_events

    def close(self) -> bytes:
        """What is left at the end of the stream: an unfinished event, or nothing."""
        rest, self._buffer, self._searched = bytes(self._buffer), bytearray(), 0
        return rest


def event(obj: object) -> bytes:
    """Format one JSON value as an event."""
    try:
        text = orjson.dumps(obj)
    except TypeError:  # lone surrogates: legal in JSON as escapes, not in UTF-8
        text = json.dumps(obj, separators=(",", ":")).encode()
    return b"data: " + text + b"\n\n"


def replaced(old: SSEEvent, obj: object) -> bytes:
    """The event with another JSON value for its data, its other fields (`event:`, `id:`) kept."""
    lines = old.raw.removeprefix(_BOM).splitlines()
    kept = [line for line in lines if line and not (line.startswith(b"data:") or line == b"data")]
    return b"".join(line + b"\n" for line in kept) + event(obj)


def comment(text: str) -> bytes:
    """Format a line that clients ignore; keeps an idle connection alive."""
    return f": {text}\n\n".encode()


def data_of(raw: bytes) -> bytes | None:
    """The data lines of an event, joined by LF; None if there is none."""
    if raw.startswith(b"data: ") and b"\n" not in (line := raw.rstrip(b"\r\n")) and b"\r" not in line:
        return line[6:]  # a single line, as is most common
    lines = [_value(line) for line in raw.splitlines() if line.startswith(b"data:") or line == b"data"]
    return b"\n".join(lines) if lines else None


def _value(line: bytes) -> bytes:
    value = line[5:]
    return value[1:] if value.startswith(b" ") else value

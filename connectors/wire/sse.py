"""Server-sent events: a parser that follows the bytes as they arrive, and the one way to write an event.

The parser never changes what it is given: the `raw` of its events, and what `close()` returns, are the input, byte
for byte. So a proxy can look into a stream and still pass it on as it came.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

import orjson

DONE: Final = b"[DONE]"
DONE_EVENT: Final = b"data: [DONE]\n\n"

# A blank line: two line ends in a row, each CRLF, LF, or a CR that is not half of a CRLF. A CRLF cut in two at the
# very end leaves its LF to begin the next event, where it is one more line without a field.
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LONGEST_END: Final = 4


class SSEError(ValueError):
    """The stream is not one we can follow."""


@dataclass(frozen=True, slots=True)
class SSEEvent:
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

    def feed(self, chunk: bytes) -> list[SSEEvent]:
        """The events that end in this chunk. Raises SSEError if one grows beyond the bound."""
        self._buffer += chunk
        events: list[SSEEvent] = []
        start = 0
        while end := _EVENT_END.search(self._buffer, max(start, self._searched)):
            raw = bytes(self._buffer[start : end.end()])
            events.append(SSEEvent(raw, _data(raw)))
            start = end.end()
            self._searched = start
        if start:
            del self._buffer[:start]
        if len(self._buffer) > self._max:
            raise SSEError(f"an event is longer than {self._max} bytes")
        self._searched = max(0, len(self._buffer) - _LONGEST_END)
        return events

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


def comment(text: str) -> bytes:
    """Format a line that clients ignore; keeps an idle connection alive."""
    return f": {text}\n\n".encode()


def _data(raw: bytes) -> bytes | None:
    lines = [_value(line) for line in raw.splitlines() if line.startswith(b"data:") or line == b"data"]
    return b"\n".join(lines) if lines else None


def _value(line: bytes) -> bytes:
    value = line[5:]
    return value[1:] if value.startswith(b" ") else value

"""Logging of a program: readable lines for people, or one JSON object per line for collectors."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from contextlib import nullcontext
from threading import get_ident
from typing import Final, Literal, TextIO

GATHER_SECONDS: Final = 0.05
MOST_GATHERED: Final = 256
"""Lines."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup(
    level: str = "info",
    format: Literal["console", "json"] = "console",
    *,
    stream: TextIO | None = None,
    gather: bool = False,
) -> None:
    """Send every log record from `level` up to `stream` (stderr), and nothing anywhere else; with `gather` what is
    logged within a moment in one go."""
    handler = (GatheringHandler if gather else logging.StreamHandler)(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # What every record is otherwise given, and no line of ours tells. A server writes a line per request.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the Logging HOWTO has it: no look for the caller
    # One line per request is the program's own to write; this one would come on top of it.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(is_no_broken_http)


def is_no_broken_http(record: logging.LogRecord) -> bool:
    """What a client sends that is no HTTP is answered 400, and is no error of ours. aiohttp's trace of it quotes what
    was sent, which may be a key."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__module__ != "aiohttp.http_exceptions"


class GatheringHandler(logging.StreamHandler[TextIO]):
    """Formats and writes what an event loop's thread logs within a moment in one go: a write is a call to the system,
    and one by one lines are formatted by code that the work between them has driven out of the processor's caches.
    Warnings and what is worse are written at once, with what is before them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._gathered: list[logging.LogRecord] = []
        self._flushed_by: asyncio.AbstractEventLoop | None = None
        """The loop that is about to, and the thread it runs in: to ask which loop runs is a call to the system."""
        self._flushed_in = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._gathered.append(record)
        try:
            if record.levelno >= logging.WARNING or len(self._gathered) >= MOST_GATHERED:
                self.flush()
            else:
                self._flush_soon()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        with self.lock or nullcontext():
            gathered, self._gathered, self._flushed_by = self._gathered, [], None
            if gathered:
                self.stream.write("".join([self._line(record) for record in gathered]))
            super().flush()

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record) + self.terminator
        except Exception:
            self.handleError(record)
            return ""

    def _flush_soon(self) -> None:
        thread = get_ident()
        if self._flushed_by is not None and self._flushed_in == thread and not self._flushed_by.is_closed():
            return None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # there is none in this thread
            return self.flush()
        self._flushed_by, self._flushed_in = loop, thread
        loop.call_later(GATHER_SECONDS, self.flush)
        return None


class ConsoleFormatter(logging.Formatter):
    """`12:03:45.123 INFO    engine.core  message key=value`"""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._time = ""

    def format(self, record: logging.LogRecord) -> str:
        if (second := int(record.created)) != self._second:  # written once for all lines of a second
            self._second, self._time = second, time.strftime("%H:%M:%S", time.localtime(second))
        text = f"{self._time}.{int(record.msecs):03d} {record.levelname:<7} {record.name}  {record.getMessage()}"
        line = " ".join([text, *[f"{key}={value}" for key, value in _extras(record)]])
        if not line.isprintable():  # what others say in it moves no cursor, and begins no line
            line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object per line: time (RFC 3339, UTC), level, logger, message, and the fields given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_extras(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _extras(record: logging.LogRecord) -> list[tuple[str, object]]:
    if isinstance(fields := record.__dict__.get("fields"), dict):  # told, and not to be found among the rest
        return list(fields.items())
    return [(key, value) for key, value in vars(record).items() if key not in _STANDARD]

"""Logging of a program: readable lines for people, or one JSON object per line for collectors."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup(level: str = "info", format: Literal["console", "json"] = "console", *, stream: TextIO | None = None) -> None:
    """Send every log record from `level` up to `stream` (stderr), and nothing anywhere else."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # One line per request is the program's own to write; this one would come on top of it.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class ConsoleFormatter(logging.Formatter):
    """`12:03:45.123 INFO    engine.core  message key=value`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join([super().formatMessage(record), *(f"{key}={value}" for key, value in _extras(record))])


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
    return [(key, value) for key, value in vars(record).items() if key not in _STANDARD]

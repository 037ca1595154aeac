"""JSON that engines write, read leniently: some write NaN, or the escaped half of an emoji."""

from __future__ import annotations

import json
from typing import Any

import orjson


def loads(data: bytes) -> Any:
    """Raises ValueError."""
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)


def dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # half an emoji has no UTF-8, only an escape
        return json.dumps(value, separators=(",", ":")).encode()

"""JSON from outside. What engines write is read leniently: some write NaN, or half an emoji, escaped or not."""

from __future__ import annotations

import json
from typing import Any

import orjson

from connectors.wire.ids import TokenIds
from connectors.wire.openai import bad_request


def loads(data: bytes) -> Any:
    """Raises ValueError."""
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    try:
        return json.loads(data.decode("utf-8-sig", errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: object) -> bytes:
    """Of what may have TokenIds in it, as all of these."""
    try:
        return orjson.dumps(value, default=_ids_text)
    except TypeError:  # half an emoji has no UTF-8, only an escape
        return json.dumps(value, separators=(",", ":"), default=_ids_list).encode()


def dumps_request(value: object, *, option: int | None = None) -> bytes:
    """What a client sent. Raises APIError 400 if it cannot be written: reading goes 1024 levels deep, writing 254."""
    try:
        return orjson.dumps(value, default=_ids_text, option=option)
    except TypeError:
        raise bad_request("The request body is nested too deeply.") from None


def _ids_text(value: object) -> orjson.Fragment:
    if isinstance(value, TokenIds):
        return orjson.Fragment(value.text)
    raise TypeError


def _ids_list(value: object) -> list[int]:
    if isinstance(value, TokenIds):
        return value.numbers.tolist()
    raise TypeError

"""Typed, strict reads from a model's own description: config.json, or the metadata of a GGUF file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from engine.model.errors import ModelError

_LARGEST = 1 << 31


class Fields:
    """A mapping whose wrong or missing values are ModelErrors that name the file and the key."""

    def __init__(self, source: str, values: Mapping[str, object]) -> None:
        self.source = source
        self._values = values

    @classmethod
    def from_json(cls, path: Path) -> Fields:
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ModelError(f"{path} is not valid JSON") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} is not a JSON object")
        return cls(str(path), values)

    def get(self, key: str) -> object:
        """The raw value; None if the key is missing."""
        return self._values.get(key)

    def with_(self, key: str, value: object) -> Fields:
        """The same with another value for one key."""
        return Fields(self.source, {**self._values, key: value})

    def with_default(self, key: str, value: object) -> Fields:
        """The same with a value for a key that has none."""
        return self if self.get(key) is not None else self.with_(key, value)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
            raise self.wrong(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested object; None if missing or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(f"{self.source}: {key}", value)

    def wrong(self, key: str, expected: str) -> ModelError:
        shown = repr(self._values.get(key))
        return ModelError(f"{self.source}: {key} must be {expected}, not {shown[:60]}")

    def _required(self, key: str, default: object) -> object:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source}: {key} is missing")
        return value

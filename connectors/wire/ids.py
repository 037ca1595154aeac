"""Token ids of a prompt, in the forms in which they travel."""

from __future__ import annotations

import hashlib
from array import array
from typing import Final, Self

import orjson

ID_TYPE: Final = "I"
_NOT_OURS: Final = (b" ", b"-", b"\n", b"\r", b"\t")


class TokenIds:
    """The ids of one prompt, at least one: as numbers, as JSON, and as the digest that stands for them in a seal.

    One turn sends the same ids up to three times, and of 100,000 each form takes milliseconds: so they are kept.
    """

    __slots__ = ("_digest", "numbers", "text")

    def __init__(self, numbers: array[int], text: bytes) -> None:
        """`numbers`: `array("I")`; `text`: the same as a JSON list. Neither is to be changed."""
        self.numbers = numbers
        self.text = text
        self._digest: bytes | None = None

    @classmethod
    def of(cls, value: object) -> Self | None:
        """Of a list read from JSON; None for anything else, and for a list of anything else. No loop in Python."""
        if not isinstance(value, list) or not value:
            return value if isinstance(value, cls) else None
        try:
            numbers = array(ID_TYPE, value)  # refuses all but integers that fit, and true, which it takes for 1
        except (TypeError, OverflowError):
            return None
        text = orjson.dumps(value)
        return None if b"e" in text else cls(numbers, text)  # true and false have an e, numbers have none

    @classmethod
    def read(cls, text: bytes) -> Self | None:
        """Of the JSON of a list; None for any other. Written in another way than ours, it is written anew."""
        try:
            numbers = array(ID_TYPE, orjson.loads(text))
        except (TypeError, OverflowError, ValueError):
            return None
        if not numbers or text[:1] != b"[" or b"e" in text:
            return None
        return cls.made_of(numbers) if any(mark in text for mark in _NOT_OURS) else cls(numbers, text)

    @classmethod
    def made_of(cls, numbers: array[int]) -> Self:
        """Of `array("I")`, at least one."""
        return cls(numbers, orjson.dumps(numbers.tolist()))

    def digest(self) -> bytes:
        """SHA-256 of the numbers, 4 bytes each."""
        if self._digest is None:
            self._digest = digest_of(self.numbers)
        return self._digest

    def __len__(self) -> int:
        return len(self.numbers)

    def __eq__(self, other: object) -> bool:
        return self.numbers == other.numbers if isinstance(other, TokenIds) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)})"  # ids are prompts, which are not logged


def digest_of(numbers: array[int]) -> bytes:
    return hashlib.sha256(numbers.tobytes()).digest()

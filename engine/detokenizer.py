"""Text from token ids that arrive a few at a time: only whole characters are given out, and nothing is given twice."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder(Protocol):
    """All that step() and flush() return, joined, is what decoding every id at once gives."""

    def step(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete; an unfinished character is kept back."""

    def flush(self) -> str:
        """What is left at the end: replacement characters for an unfinished character, or nothing."""


class ByteLevelDecoder:
    """For vocabularies whose tokens are bytes: one table look-up per token, however long the text gets."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other vocabulary: decodes the last few tokens twice, without and with the new ones, and takes the rest.

    The tokens before the new ones give the decoder its context, such as whether a leading space belongs to the text.
    """

    _MAX_HELD = 8
    """Tokens. A character has at most four bytes: longer without a whole one, and the bytes are not text."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []

    def step(self, ids: Sequence[int]) -> str:
        return "".join(self._take([id_], final=False) for id_ in ids)

    def flush(self) -> str:
        return self._take([], final=True)

    def _take(self, ids: list[int], *, final: bool) -> str:
        self._held += ids
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        if after.endswith(REPLACEMENT) and not final and len(self._held) <= self._MAX_HELD:
            return ""
        if len(after) > len(before):
            self._context, self._held = self._held, []
        return after[len(before) :]


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """The byte each character of a byte-level token stands for.

    Printable Latin-1 characters stand for themselves, and the other 68 bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def bytes_of_token(token: str) -> bytes:
    """The bytes of a byte-level token; one that holds other characters, as added tokens may, is text as it stands."""
    table = byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def bytes_of_piece(piece: str) -> bytes:
    """The bytes of a SentencePiece token: a single one, or text in which ▁ is a space."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()

"""Answers of engines with thousands of token ids in them: the list is cut out and read apart from the rest.

So its text is at hand to be sent on, and a list that is known already, as most are after the first leg, is recognised
by its text without being read: 10,000 ids as objects cost a millisecond, every time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Final

from connectors.wire.ids import TokenIds
from connectors.wire.note import TOKEN_NOTE
from router import jsontext

PROMPT_IDS: Final = "prompt_token_ids"
TOKENS: Final = "tokens"
WORTH_BYTES: Final = 1 << 12
"""Of an answer, from which on this is faster than to read everything at once."""

_STAND_IN: Final = secrets.token_hex()
"""In the place of a list: no engine can have written it."""
_STAND_IN_JSON: Final = f'"{_STAND_IN}"'.encode()
_MARKS: Final = {key: f'"{key}":['.encode() for key in (PROMPT_IDS, TOKENS)}


def read_answer(data: bytes, key: str = PROMPT_IDS, known: TokenIds | None = None) -> Any:
    """JSON, in which the prompt's ids under `key` may be TokenIds; `known`: what they probably are. Raises ValueError.

    They are a list as always where they stand in another place than engines put them, or are none.
    """
    if len(data) >= WORTH_BYTES and (cut := _cut(data, _MARKS[key], known)) is not None:
        ids, rest = cut
        try:
            body = jsontext.loads(rest)
        except ValueError:
            body = None  # it was not JSON before either, or the list was no list of ids
        for holder in _holders(body):
            if holder.get(key) == _STAND_IN:
                holder[key] = ids
                return body
    return jsontext.loads(data)


def _cut(data: bytes, mark: bytes, known: TokenIds | None) -> tuple[TokenIds, bytes] | None:
    """The first list of ids after the mark, and the rest of the text."""
    # A quote within a JSON string has a backslash before it, so that what is found after one of these is a key.
    if (at := data.find(mark)) < 1 or data[at - 1] not in b"{,":
        return None
    start = at + len(mark) - 1
    end = data.find(b"]", start) + 1
    text = data[start:end]
    ids = known if known is not None and text == known.text else TokenIds.read(text)
    return None if ids is None else (ids, data[:start] + _STAND_IN_JSON + data[end:])


def _holders(body: object) -> Iterator[dict[str, Any]]:
    """Where an answer may have the ids of its prompt."""
    if isinstance(body, dict):
        yield body
        choices = body.get("choices")
        for holder in (choices[0] if isinstance(choices, list) and choices else None, body.get(TOKEN_NOTE)):
            if isinstance(holder, dict):
                yield holder

"""Structured output: what an answer must look like."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, Protocol

MAX_SOURCE = 1 << 18
"""Characters of a constraint, at most."""
MAX_MESSAGE = 200
"""Characters of a complaint: it may quote the grammar at length."""


class GrammarError(ValueError):
    """A constraint that cannot be compiled, or is more work than the engine does for one."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A request's constraint on its output, as yet unchecked."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    source: str
    """A JSON schema as text, nothing, a regular expression, a JSON array of strings, or a grammar in Lark notation."""
    param: str = "structured_outputs"
    """The field it came from, for error messages."""


class Matcher(Protocol):
    """How far one answer has come through its grammar. Never raises: what goes wrong is told by `failure`."""

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, for the client."""

    @property
    def may_end(self) -> bool:
        """The answer so far is whole."""

    def bitmask(self) -> bytes:
        """Of the tokens that may come next, EOS included where the answer may end: bit i % 8 of byte i // 8 is token
        i."""

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled."""


def lark_string(text: str) -> str:
    """A text as a string of a Lark grammar: JSON's notation, without the one control character that JSON takes raw."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def shortened(complaint: str) -> str:
    """On one line, for an error message."""
    complaint = " ".join(complaint.split())
    return complaint if len(complaint) <= MAX_MESSAGE else complaint[:MAX_MESSAGE] + "…"

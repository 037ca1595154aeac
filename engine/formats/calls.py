"""What the ways of writing tool calls have in common."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.formats.base import FormatError, Json, Piece, ToolChoice
from engine.formats.reading import Gathered, Reading, Tape
from engine.grammar import lark_string

_PLAIN = re.compile(r"[^<\s][^<]*")
Mark = Callable[[str], str]
"""A terminal for one of a model's marks: a special token or a string."""


class CallSyntax(Protocol):
    """One way of writing calls. It keeps nothing of an answer."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings that may be special tokens of the model, but must be seen as text."""

    def read(self, tape: Tape, out: Gathered) -> Reading[None]:
        """The program that reads an answer. It never ends; what is on the tape when the text ends is content."""

    def rules(self, functions: Sequence[Mapping[str, Any]], *, parallel: bool, mark: Mark) -> str:
        """Rules in Lark's notation, of which `calls` is a call of one of these functions, or several."""


class CallReader:
    """One answer, parted into content and calls."""

    def __init__(self, syntax: CallSyntax, new_id: Callable[[], str]) -> None:
        self._tape = Tape()
        self._out = Gathered(new_id)
        self._program = syntax.read(self._tape, self._out)
        next(self._program)

    def push(self, text: str) -> Piece:
        at = 0
        while at < len(text):
            run = _PLAIN.match(text, at) if self._tape.calm else None
            if run is None:
                self._program.send(text[at])
                at += 1
            else:
                plain = run[0].rstrip()
                self._out.content(self._tape.take() + plain)
                self._tape.closing = False
                at += len(plain)
        return self._out.take()

    def end(self) -> Piece:
        rest = self._tape.take()
        if not self._tape.closing:
            self._out.content(rest)
        return self._out.take()


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def functions_for(tools: Sequence[Json], choice: ToolChoice) -> list[Mapping[str, Any]]:
    """The functions among which there is a choice. Raises FormatError if the one demanded is not there."""
    functions = [tool["function"] for tool in tools]
    if not choice.startswith("="):
        return functions
    found = [function for function in functions if function["name"] == choice[1:]]
    if not found:
        raise FormatError(f"there is no function {choice[1:]!r} among the tools")
    return found[:1]


def object_rules(functions: Sequence[Mapping[str, Any]], arguments_key: str) -> str:
    """Rules of which `call_object` is `{"name": …, "<arguments_key>": {…}}` for one of the functions."""
    rules = ["call_object: " + " | ".join(f"function_{i}" for i in range(len(functions)))]
    for index, function in enumerate(functions):
        opening = lark_string(f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{arguments_key}": ')
        # Arguments are an object, whatever else a schema says or leaves open.
        schema = json.dumps({**(function.get("parameters") or {}), "type": "object"}, ensure_ascii=False)
        rules.append(f'function_{index}: {opening} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {schema}")
    return "\n".join(rules)

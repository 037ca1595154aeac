"""How formats read text that comes in pieces: programs that take one character at a time.

A program is a generator that is sent characters. What it has read but not decided about is kept on its tape, so that
whatever turns out not to be what it looked like can still be given out as the text it is. As characters come one by
one, nothing can depend on how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeVar

from engine.formats.base import CallDelta, Piece

T = TypeVar("T")
Reading = Generator[None, str, T]

FILLERS = frozenset({"id", "type"})
"""Members that models put into calls beside the two that count."""


class Malformed(Exception):
    """What is read is not what the format wants there. The character in question is still to be read."""


class Tape:
    """The characters a program reads."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._again: str | None = None
        self.closing = False
        """A call has just ended: should the text end too, what is held is the rest of its syntax and no content."""
        self.calm = False
        """No more than white space is held, and whatever comes is content, at least up to a `<`: no need to read it
        one character at a time."""

    def next(self) -> Reading[str]:
        char = self._again
        self._again = None
        if char is None:
            char = yield
        self._held.append(char)
        return char

    def back(self) -> None:
        """Have the last character read again."""
        assert self._again is None, "only one character can be put back"
        self._again = self._held.pop()

    def take(self) -> str:
        """What has been read since the last take(), to be given out or forgotten."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def solid(self) -> Reading[str]:
        """The next character that is not white space."""
        while (char := (yield from self.next())).isspace():
            pass
        return char

    def expect(self, wanted: str) -> Reading[None]:
        """White space, then this character. Raises Malformed."""
        if (yield from self.solid()) != wanted:
            raise self.malformed()

    def matches(self, literal: str) -> Reading[bool]:
        """Read as much of `literal` as there is."""
        for wanted in literal:
            if (yield from self.next()) != wanted:
                self.back()
                return False
        return True

    def string(self) -> Reading[str]:
        """A JSON string whose opening quote has been read. Raises Malformed."""
        raw = ['"']
        escaped = False
        while True:
            char = yield from self.next()
            raw.append(char)
            if char < " ":
                raise self.malformed()
            if char == '"' and not escaped:
                break
            escaped = char == "\\" and not escaped
        try:
            value: str = json.loads("".join(raw))
            value.encode()  # half of a surrogate pair is no text
        except ValueError:
            raise self.malformed() from None
        return value

    def malformed(self) -> Malformed:
        """To be raised: the last character is what is wrong."""
        self.back()
        return Malformed()


class Gathered:
    """What a program has made out since it was last asked."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []
        self._num_calls = 0

    def content(self, text: str) -> None:
        self._content.append(text)

    def begin(self, name: str) -> None:
        """A call; what follows are its arguments."""
        self._settle()
        self._calls.append(CallDelta(self._num_calls, id=self._new_id(), name=name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        self._arguments.append(text)

    def take(self) -> Piece:
        self._settle()
        piece = Piece(content="".join(self._content), calls=tuple(self._calls))
        self._content, self._calls = [], []
        return piece

    def _settle(self) -> None:
        if not self._arguments:
            return
        text = "".join(self._arguments)
        self._arguments.clear()
        last = self._calls.pop() if self._calls else CallDelta(self._num_calls - 1)
        self._calls.append(CallDelta(last.index, text, last.id, last.name))


def read_call(tape: Tape, out: Gathered, arguments_keys: frozenset[str]) -> Reading[None]:
    """`{"name": …, "arguments": {…}}`, its members in any order, after its opening brace.

    Once it is a call for certain what was on the tape is forgotten: only what comes later can still be content.
    Raises Malformed; a call that has begun stays one.
    """
    name: str | None = None
    arguments: str | None = None
    while True:
        yield from tape.expect('"')
        key = yield from tape.string()
        yield from tape.expect(":")
        if key in arguments_keys and arguments is None:
            yield from tape.expect("{")
            if name is None:
                kept: list[str] = []
                yield from _object(tape, kept.append)
                arguments = "".join(kept)
            else:
                arguments = ""
                tape.take()
                tape.closing = True
                out.begin(name)
                yield from _object(tape, out.arguments, forget=True)
        elif key == "name" and name is None:
            yield from tape.expect('"')
            name = yield from tape.string()
            if not name:
                raise tape.malformed()
        elif key in FILLERS:
            yield from tape.expect('"')
            yield from tape.string()
        else:
            raise tape.malformed()
        if (char := (yield from tape.solid())) == "}":
            break
        if char != ",":
            raise tape.malformed()
    if name is None:
        raise tape.malformed()
    tape.take()
    tape.closing = True
    if arguments != "":  # told whole: the name came last, or there are none
        out.begin(name)
        out.arguments(arguments or "{}")


def _object(tape: Tape, give: Callable[[str], None], *, forget: bool = False) -> Reading[None]:
    """The text of a JSON object from its opening brace, just read, to the one that closes it. Brackets and strings are
    told apart; whether it is good JSON is for who reads it."""
    give("{")
    depth, quoted, escaped = 1, False, False
    while depth:
        char = yield from tape.next()
        if forget:
            tape.take()
        give(char)
        if quoted:
            quoted = char != '"' or escaped
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1

"""Tool calls as Llama 3 writes them: an answer that is `{"name": …, "parameters": {…}}` and nothing else, or several
of those with semicolons between. `<|python_tag|>` may stand before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.formats.calls import Mark, object_rules
from engine.formats.reading import Gathered, Malformed, Reading, Tape, read_call

TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class Llama3Calls:
    marks: tuple[str, ...] = ()
    """None that must be seen: the tag may be there or not."""

    def read(self, tape: Tape, out: Gathered) -> Reading[None]:
        try:
            char = yield from tape.solid()
            if char == TAG[0] and (yield from tape.matches(TAG[1:])):
                char = yield from tape.solid()
            while char == "{":
                tape.closing = False
                yield from read_call(tape, out, frozenset({"parameters", "arguments"}))
                yield from tape.expect(";")
                char = yield from tape.solid()
        except Malformed:
            pass
        tape.closing, tape.calm = False, True
        while True:  # no call, or no further one: all that follows is content
            out.content(tape.take())
            yield from tape.next()

    def rules(self, functions: Sequence[Mapping[str, Any]], *, parallel: bool, mark: Mark) -> str:
        several = '("; " call_object)*' if parallel else ""
        return f"calls: call_object {several}\n{object_rules(functions, 'parameters')}"

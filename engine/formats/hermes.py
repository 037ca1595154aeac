"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Content may stand before, between and after. White space beside a call is layout, not content: chat templates put it
in again, whatever the content was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.formats.calls import Mark, object_rules
from engine.formats.reading import Gathered, Malformed, Reading, Tape, read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NEWLINE = r'"\n"'
"""In Lark's notation."""


@dataclass(frozen=True, slots=True)
class HermesCalls:
    marks: tuple[str, ...] = (OPEN, CLOSE)

    def read(self, tape: Tape, out: Gathered) -> Reading[None]:
        while True:
            tape.calm = True
            char = yield from tape.next()
            tape.calm = False
            if char.isspace():
                continue
            tape.closing = False
            if char == OPEN[0] and (yield from tape.matches(OPEN[1:])):
                try:
                    yield from tape.expect("{")
                    yield from read_call(tape, out, frozenset({"arguments"}))
                    yield from tape.expect(CLOSE[0])
                    if (yield from tape.matches(CLOSE[1:])):
                        tape.take()
                        continue
                except Malformed:
                    pass
            out.content(tape.take())

    def rules(self, functions: Sequence[Mapping[str, Any]], *, parallel: bool, mark: Mark) -> str:
        several = f"({NEWLINE} call)*" if parallel else ""
        return "\n".join(
            [
                f"calls: call {several}",
                f"call: {mark(OPEN)} {NEWLINE} call_object {NEWLINE} {mark(CLOSE)}",
                object_rules(functions, "arguments"),
            ]
        )

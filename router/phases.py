"""What a turn does, one thing after the other, and the span that follows it where turns are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from router.faults import EngineFault
    from router.report import Report

Phase = Literal["read", "queue", "recall", "tokenize", "encode", "prefill", "decode", "remember"]
"""read      the request's body
queue     waits for room in a pool
recall    looks for the conversation's record, compares and plans
tokenize  has the prompt's ids told
encode    has its media encoded
prefill   the prefill leg
decode    the decode leg, until the end of its answer
remember  files the record for the next turn
"""


class Span(Protocol):
    """A turn's place in a trace. None of it fails, or takes time that counts."""

    def enter(self, phase: Phase | None) -> None:
        """The last phase is over, and this one begins."""
        ...

    def context(self, engine: str) -> str:
        """Header lines for a leg of the phase it is in, to this engine."""
        ...

    def retried(self, fault: EngineFault) -> None:
        """The turn goes on in spite of this."""
        ...

    def end(self, report: Report) -> None:
        """The turn has ended, as the report says."""
        ...

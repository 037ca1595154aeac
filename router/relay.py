"""An engine's event stream on its way to the client: event by event, byte for byte but for what is taken out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from connectors.wire import sse
from connectors.wire.openai import error_body
from router import jsontext
from router.answer import Answer

_CUT: Final = error_body(
    "The answer was cut off: the engine stopped sending. Send the request again.", type="InternalServerError", code=502
)


class StreamRelay:
    """Turns the bytes of an engine's event stream into those for the client.

    The end of the stream (`[DONE]`, or the event that stands for it) is held back until `finish`, so that the turn can
    be remembered before the client knows that it is over.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.done = False
        self._parser = sse.SSEParser()
        self._end = b""

    @property
    def complete(self) -> bool:
        """Whether the engine said everything: the stream ended as it should, and told of no error."""
        return self.done and self.answer.seen.error is None

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets for these bytes. Raises SSEError if they cannot be a stream of events."""
        answer = self.answer
        if not (self.done or answer.must_read(chunk) or sse.DONE in chunk) and (num_events := self._parser.skip(chunk)):
            answer.pass_by(chunk, num_events)
            return chunk
        return b"".join([self._pass(event) for event in self._parser.feed(chunk)])

    def finish(self, error: Mapping[str, Any] | None = None) -> bytes:
        """The end of the stream, or an event that says that it is missing, with the reason if we know it."""
        if not self.done and sse.data_of(self._parser.close()) == sse.DONE:
            self.done, self._end = True, sse.DONE_EVENT
        if self.done:
            return self._end
        return b"" if self.answer.seen.error is not None else self.answer.error_event(error or _CUT)

    def _pass(self, event: sse.SSEEvent) -> bytes:
        if self.done:
            return b""
        if event.data is None:
            return event.raw
        if event.data == sse.DONE:
            self.done, self._end = True, event.raw
            return b""
        answer = self.answer
        if not answer.must_read(event.data):
            answer.pass_by(event.raw, 1)
            return event.raw
        try:
            body = jsontext.loads(event.data)
        except ValueError:
            return event.raw
        if not isinstance(body, dict):
            return event.raw
        out = event.raw
        if answer.take(body):
            out = b"" if answer.is_superfluous(body) else sse.replaced(event, body)
        if answer.ended:
            self.done, self._end = True, out
            return b""
        return out

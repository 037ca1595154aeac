"""What an engine's answer says, and what of it the client gets.

Engines put into their answers what only the router may know: where the KV lies, and token ids. This module takes
that out and keeps it. A stream is passed on event by event as it arrives, those with nothing to take out byte for
byte; a whole answer is cleaned in place, so that everything else in it stays as the engine wrote it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final

from connectors.wire import sse
from connectors.wire.openai import error_body
from connectors.wire.transfer import KVTransferParams, WireError
from router import jsontext

_CUT: Final = error_body(
    "The answer was cut off: the engine stopped sending. Send the request again.", type="InternalServerError", code=502
)


class Answer:
    """What was seen of one answer so far."""

    def __init__(self, *, keep_token_ids: bool, keep_usage: bool) -> None:
        self._keep_token_ids = keep_token_ids
        self._keep_usage = keep_usage
        self.params: KVTransferParams | None = None
        """Where the engine says this answer's KV lies."""
        self.prompt_token_ids: list[int] | None = None
        self.output_token_ids = array("I")
        self.num_cached_tokens: int | None = None
        """Prompt tokens that nobody computed for it, where the engine says so with the first piece."""
        self.usage: Mapping[str, Any] = {}
        self.finished = False
        """A first choice has ended by itself."""
        self.error: Mapping[str, Any] | None = None
        self._text: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._ids_complete = True

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message of the first choice, as a client would put it into the history."""
        calls = [{"function": call} for _, call in sorted(self._calls.items())]
        return {"role": "assistant", "content": "".join(self._text), "tool_calls": calls}

    @property
    def output_ids_complete(self) -> bool:
        """Whether the ids are those of every token: an engine that hides its reasoning withholds some."""
        counted = self.usage.get("completion_tokens")
        return self._ids_complete and counted in (None, len(self.output_token_ids))

    def take(self, body: dict[str, Any]) -> bool:
        """Read one event or a whole answer, and remove from it what is not the client's. True if it was changed."""
        changed = False
        if "kv_transfer_params" in body:
            self._see_params(body.pop("kv_transfer_params"))
            changed = True
        if "ec_transfer_params" in body:
            del body["ec_transfer_params"]
            changed = True
        if "num_cached_tokens" in body:
            cached = body.pop("num_cached_tokens")
            self.num_cached_tokens = cached if isinstance(cached, int) else None
            changed = True
        changed |= self._take_ids(body, 0)
        choices = body.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                changed |= self._take_choice(choice)
        return self._take_usage(body) or changed

    def _see_params(self, value: object) -> None:
        if isinstance(value, dict):
            try:
                self.params = KVTransferParams.parse(value)
            except WireError:
                self.params = None

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        index = choice.get("index") or 0
        changed = self._take_ids(choice, index)
        if index == 0:
            said = choice.get("message") or choice.get("delta") or choice
            if isinstance(said, dict):
                self._see_message(said)
            self.finished |= choice.get("finish_reason") is not None
        return changed

    def _take_ids(self, holder: dict[str, Any], index: int) -> bool:
        prompt, output = holder.get("prompt_token_ids"), holder.get("token_ids")
        if index == 0 and isinstance(prompt, list) and self.prompt_token_ids is None:
            self.prompt_token_ids = prompt
        if index == 0 and isinstance(output, list):
            try:
                self.output_token_ids.extend(output)
            except (TypeError, OverflowError):
                self._ids_complete = False
        if self._keep_token_ids:
            return False
        present = [key for key in ("prompt_token_ids", "token_ids") if key in holder]
        for key in present:
            del holder[key]
        return bool(present)

    def _see_message(self, said: Mapping[str, Any]) -> None:
        for key in ("content", "text"):
            if isinstance(text := said.get(key), str):
                self._text.append(text)
        calls = said.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                index = call.get("index", position)
                known = self._calls.setdefault(index if isinstance(index, int) else position, {})
                for key in ("name", "arguments"):
                    if isinstance(part := function.get(key), str):
                        known[key] = known.get(key, "") + part

    def _take_usage(self, body: dict[str, Any]) -> bool:
        usage = body.get("usage")
        if isinstance(usage, dict) and any(usage.values()):
            self.usage = usage  # some engines repeat it, or send zeros on the way: the last with anything in it counts
        if self._keep_usage or "usage" not in body:
            return False
        del body["usage"]
        return True


class StreamRelay:
    """Turns the bytes of an engine's event stream into those for the client.

    The end of the stream (`[DONE]`) is held back until `finish`, so that the turn can be remembered before the
    client knows that it is over.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.done = False
        self._parser = sse.SSEParser()
        self._end = b""

    @property
    def complete(self) -> bool:
        """Whether the engine said everything: the stream ended as it should, and told of no error."""
        return self.done and self.answer.error is None

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets for these bytes. Raises SSEError if they cannot be a stream of events."""
        return b"".join(self._pass(event) for event in self._parser.feed(chunk))

    def finish(self, error: Mapping[str, Any] | None = None) -> bytes:
        """The end of the stream, or an event that says that it is missing, with the reason if we know it."""
        if not self.done and self._parser.close().strip() == b"data: [DONE]":
            self.done, self._end = True, sse.DONE_EVENT
        if self.done:
            return self._end
        return b"" if self.answer.error is not None else sse.event(error or _CUT)

    def _pass(self, event: sse.SSEEvent) -> bytes:
        if self.done:
            return b""
        if event.data is None:
            return event.raw
        if event.data == sse.DONE:
            self.done, self._end = True, event.raw
            return b""
        try:
            body = jsontext.loads(event.data)
        except ValueError:
            return event.raw
        if not isinstance(body, dict):
            return event.raw
        if error := body.get("error"):
            self.answer.error = error if isinstance(error, dict) else {"message": str(error)}
        only_usage = body.get("choices") == [] and bool(body.get("usage"))
        if not self.answer.take(body):
            return event.raw
        if only_usage and "usage" not in body:
            return b""  # the chunk only we had asked for
        return sse.event(body)

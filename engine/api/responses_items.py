"""The output items of a response, and the events by which a stream tells of them.

One item is open at a time; what comes of another kind closes it. Items know neither their place nor the model's
format: they are given its pieces, and the pieces do not depend on how the answer came.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

from engine.formats.base import CallDelta

Json = dict[str, Any]


class Item(Protocol):
    """One output item in the making."""

    id: str

    def to_json(self, status: str) -> Json:
        """The item as far as it has come."""

    def opening(self) -> list[Json]:
        """Events between `output_item.added` and its first piece."""

    def add(self, text: str, logprobs: Sequence[Json] = ()) -> Json:
        """Take the next piece; returns its event."""

    def closing(self) -> list[Json]:
        """Events before `output_item.done`."""


class Message:
    """What the model says to the user."""

    def __init__(self) -> None:
        self.id = _new_id("msg")
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def to_json(self, status: str) -> Json:
        content = [self._part()] if self._text else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def opening(self) -> list[Json]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def add(self, text: str, logprobs: Sequence[Json] = ()) -> Json:
        self._text.append(text)
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": list(logprobs)}

    def closing(self) -> list[Json]:
        part = self._part()
        done = {"type": "response.output_text.done", "content_index": 0, "text": part["text"]}
        return [
            done | {"logprobs": part["logprobs"]},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def _part(self) -> Json:
        text = "".join(self._text)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class Reasoning:
    """What the model thinks."""

    def __init__(self) -> None:
        self.id = _new_id("rs")
        self._text: list[str] = []

    def to_json(self, status: str) -> Json:
        content = [self._part()] if self._text else []
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def opening(self) -> list[Json]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def add(self, text: str, logprobs: Sequence[Json] = ()) -> Json:
        self._text.append(text)
        return {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def closing(self) -> list[Json]:
        part = self._part()
        return [
            {"type": "response.reasoning_text.done", "content_index": 0, "text": part["text"]},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": "".join(self._text)}


class FunctionCall:
    """A function the client is to call."""

    def __init__(self, call: CallDelta) -> None:
        self.id = _new_id("fc")
        self._call_id = call.id or _new_id("call")
        self._name = call.name or ""
        self._arguments: list[str] = []

    def to_json(self, status: str) -> Json:
        told = {"call_id": self._call_id, "name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self.id, "type": "function_call", "status": status} | told

    def opening(self) -> list[Json]:
        return []

    def add(self, text: str, logprobs: Sequence[Json] = ()) -> Json:
        self._arguments.append(text)
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def closing(self) -> list[Json]:
        arguments = "".join(self._arguments)
        return [{"type": "response.function_call_arguments.done", "name": self._name, "arguments": arguments}]


class Items:
    """All of one response, in order."""

    def __init__(self) -> None:
        self._done: list[Json] = []
        self._open: Item | None = None
        self.call_index = -1
        """Of the last function call."""
        self._blank: list[tuple[str, Sequence[Json]]] = []
        """White space that would begin a message: between thoughts and calls it is none."""

    def to_json(self) -> list[Json]:
        """As far as they have come; the last may have no end."""
        return self._done if self._open is None else [*self._done, self._open.to_json("incomplete")]

    def think(self, text: str) -> list[Json]:
        events = [] if isinstance(self._open, Reasoning) else self._begin(Reasoning())
        return [*events, *self._add(text)]

    def say(self, text: str, logprobs: Sequence[Json]) -> list[Json]:
        if isinstance(self._open, Message):
            return self._add(text, logprobs)
        if text.isspace():
            self._blank.append((text, logprobs))
            return []
        pieces = [*self._blank, (text, logprobs)]
        events = self._begin(Message())
        return events + [event for piece in pieces for event in self._add(*piece)]

    def call(self, call: CallDelta) -> list[Json]:
        events = []
        if call.index != self.call_index:
            self.call_index = call.index
            events = self._begin(FunctionCall(call))
        assert isinstance(self._open, FunctionCall), "arguments of a call that has ended"
        return [*events, *self._add(call.arguments)] if call.arguments else events

    def end(self, status: str) -> list[Json]:
        """Nothing will follow; `status` is that of the last item."""
        events = []
        if self._blank and self._open is None and not self._done:  # all that was said
            blank = self._blank
            events = self._begin(Message()) + [event for piece in blank for event in self._add(*piece)]
        return events + self._close(status)

    def _begin(self, item: Item) -> list[Json]:
        events = self._close("completed")
        self._open, self._blank = item, []
        added = {"type": "response.output_item.added", "output_index": len(self._done)}
        return [*events, added | {"item": item.to_json("in_progress")}, *map(self._placed, item.opening())]

    def _add(self, text: str, logprobs: Sequence[Json] = ()) -> list[Json]:
        assert self._open is not None, "a piece of no item"
        return [self._placed(self._open.add(text, logprobs))]

    def _close(self, status: str) -> list[Json]:
        if self._open is None:
            return []
        item = self._open.to_json(status)
        done = {"type": "response.output_item.done", "output_index": len(self._done), "item": item}
        events = [*map(self._placed, self._open.closing()), done]
        self._done.append(item)
        self._open = None
        return events

    def _placed(self, event: Json) -> Json:
        assert self._open is not None, "an event of no item"
        return {**event, "item_id": self._open.id, "output_index": len(self._done)}


def joined(events: list[Json]) -> list[Json]:
    """The same with deltas that follow each other as one: a reader slower than the model gets fewer events."""
    result: list[Json] = []
    for of, group in groupby(events, lambda event: (event["type"], event["item_id"]) if "delta" in event else None):
        run = list(group)
        if of is None or len(run) == 1:
            result += run
            continue
        whole = {**run[0], "delta": "".join(event["delta"] for event in run)}
        if "logprobs" in whole:
            whole["logprobs"] = [entry for event in run for entry in event["logprobs"]]
        result.append(whole)
    return result


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"

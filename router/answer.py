"""What an engine's answer says, and what of it the client gets.

Engines put into their answers what only the router may know: where the KV lies, and token ids. Reading an answer takes
that out and keeps it; everything else stays as the engine wrote it. Most events of a stream say nothing of the kind:
`must_read` tells them by a look at their bytes, and they pass as they came.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from connectors.wire import sse
from connectors.wire.ids import ID_TYPE, TokenIds
from connectors.wire.note import TOKEN_NOTE, note_of
from connectors.wire.transfer import KVTransferParams, WireError
from router import jsontext

READ_AHEAD_BYTES: Final = 32 << 10
"""Of events passed unread, until their text is looked at: one by one would delay each, all at once cost memory."""
PARAMS: Final = ("kv_transfer_params", "ec_transfer_params")


@dataclass(slots=True)
class Wishes:
    """What of an answer is the client's beside the answer itself."""

    prompt_ids: bool = False
    output_ids: bool = False
    usage: bool = True
    params: bool = False
    """An operator debugs: transfer params stay in."""


@dataclass(slots=True)
class Usage:
    """Tokens as the engine counted them, None where it did not say."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Usage:
        """Under the names that chats and completions have for them, or those of responses."""
        details = told.get("prompt_tokens_details") or told.get("input_tokens_details")
        return cls(
            _count(told.get("prompt_tokens", told.get("input_tokens"))),
            _count(told.get("completion_tokens", told.get("output_tokens"))),
            _count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        )


class Answer(Protocol):
    """One answer as it comes; see `ChoicesAnswer` and `router/response_answer.py`."""

    seen: Seen
    keeps_message: bool
    """Whether `message` will be asked for; to be set before the first event."""

    def must_read(self, data: bytes) -> bool:
        """Whether the data of events may hold what is not for the client, or what the router needs at once."""

    def pass_by(self, raw: bytes, num_events: int) -> None:
        """Events go to the client unread."""

    def take(self, body: dict[str, Any]) -> bool:
        """Read one event or a whole answer, and remove from it what is not the client's. True if it was changed."""

    def is_superfluous(self, body: dict[str, Any]) -> bool:
        """Whether an event that `take` has changed says nothing to the client any more."""

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        """The event that tells the client of an error body."""

    @property
    def ended(self) -> bool:
        """Whether the last event of the stream was seen, where that is not `[DONE]`."""

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message of the first choice, as a client would put it into the history of a chat."""


class Seen:
    """What the router has learnt from an answer, whatever its shape."""

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.params: KVTransferParams | None = None
        """Where the engine says this answer's KV lies."""
        self.prompt_token_ids: TokenIds | None = None
        self.output_token_ids = array(ID_TYPE)
        self.num_cached_tokens: int | None = None
        """Prompt tokens that nobody computed for it, where the engine says so with the first piece."""
        self.usage = Usage()
        self.finished = False
        """A first choice has ended by itself."""
        self.stop_reason: object = None
        """What has ended it, where the engine says so: a stop string, or the id of a stop token."""
        self.error: Mapping[str, Any] | None = None
        self._ids_complete = True

    @property
    def output_ids_complete(self) -> bool:
        """Whether the ids are those of every token: an engine that hides its reasoning withholds some."""
        return self._ids_complete and self.usage.completion in (None, len(self.output_token_ids))

    def take_params(self, holder: dict[str, Any]) -> bool:
        """Transfer params and token note, wherever an endpoint has them."""
        present = [key for key in (*PARAMS, TOKEN_NOTE) if key in holder]
        if not present:
            return False
        if isinstance(told := holder.get(PARAMS[0]), dict):
            try:
                self.params = KVTransferParams.parse(told)
            except WireError:
                self.params = None
        note = note_of(holder)
        self.see_prompt_ids(note.get("prompt_token_ids"))
        if isinstance(cached := note.get("num_cached_tokens"), int):
            self.num_cached_tokens = cached
        if "token_ids" in note:
            self.output_token_ids = array(ID_TYPE)
            self.see_output_ids(note["token_ids"])
        gone = [key for key in present if key == TOKEN_NOTE or not self.wishes.params]
        for key in gone:
            del holder[key]
        return bool(gone)

    def see_prompt_ids(self, ids: object) -> None:
        if self.prompt_token_ids is None:
            self.prompt_token_ids = TokenIds.of(ids)

    def see_output_ids(self, ids: object) -> None:
        if isinstance(ids, list):
            try:
                self.output_token_ids.extend(ids)
            except (TypeError, OverflowError):
                self._ids_complete = False

    def see_usage(self, told: object) -> None:
        # Some engines repeat it, or send zeros on the way: the last with anything in it counts.
        if isinstance(told, dict) and any(told.values()):
            self.usage = Usage.read(told)


# Quotes within a JSON string are escaped, so what matches is no text of the answer.
# That each begins with a quote lets the search go from one to the next.
_NOTED = rb'error"|token_note"|num_cached_tokens"|(?:kv|ec)_transfer_params"|finish_reason":\s*"'
_MARKS_OF_OURS: Final = re.compile(rb'"(?:' + _NOTED + rb'|usage":\s*\{)')
_MARKS: Final = re.compile(rb'"(?:' + _NOTED + rb'|usage"|(?:prompt_)?token_ids")')

_NOT_FINISHED: Final = (None, "abort", "error")


class ChoicesAnswer:
    """An answer of chat, completions or generate: `choices` with messages, deltas, text or token ids."""

    def __init__(self, wishes: Wishes, *, noted: bool) -> None:
        """`noted`: the engine was asked for a token note, so that events without one have nothing to hide."""
        self.seen = Seen(wishes)
        self._marks = _MARKS_OF_OURS if noted else _MARKS
        self._noted = noted
        self.keeps_message = True
        self._only_usage = False
        """Of the event taken last."""
        self._text: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._unread: list[bytes] = []
        self._num_unread = 0

    @property
    def ended(self) -> bool:
        return False

    @property
    def message(self) -> dict[str, Any]:
        self._read_on()
        calls = [{"function": call} for _, call in sorted(self._calls.items())]
        return {"role": "assistant", "content": "".join(self._text), "tool_calls": calls}

    def must_read(self, data: bytes) -> bool:
        return self._marks.search(data) is not None

    def pass_by(self, raw: bytes, num_events: int) -> None:
        if self.keeps_message:
            self._unread.append(raw)
            self._num_unread += len(raw)
            if self._num_unread >= READ_AHEAD_BYTES:
                self._read_on()

    def take(self, body: dict[str, Any]) -> bool:
        seen, wishes = self.seen, self.seen.wishes
        choices, usage = body.get("choices"), body.get("usage")
        self._only_usage = choices == [] and bool(usage)
        changed = seen.take_params(body)
        if "num_cached_tokens" in body:  # ours, beside ids that a client may ask for as well
            cached = body.pop("num_cached_tokens")
            if seen.num_cached_tokens is None and isinstance(cached, int):  # a later one is another choice's
                seen.num_cached_tokens = cached
            changed = True
        changed |= self._take_ids(body, 0)
        self._read_on()
        for choice in _dicts(choices):
            index = choice.get("index") or 0
            changed |= self._take_ids(choice, index)
            if index == 0 and choice.get("finish_reason") not in _NOT_FINISHED:
                seen.finished = True
                seen.stop_reason = choice.get("stop_reason")
            if self.keeps_message and not index:
                self._see_message(choice)
        if error := body.get("error"):
            seen.error = error if isinstance(error, dict) else {"message": str(error)}
        seen.see_usage(usage)
        if wishes.usage or "usage" not in body:
            return changed
        del body["usage"]
        return True

    def is_superfluous(self, body: dict[str, Any]) -> bool:
        return self._only_usage and "usage" not in body

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        return sse.event(error)

    def _take_ids(self, holder: dict[str, Any], index: int) -> bool:
        seen, changed = self.seen, False
        if "prompt_token_ids" in holder:
            if index == 0:
                seen.see_prompt_ids(holder["prompt_token_ids"])
            if not seen.wishes.prompt_ids:
                del holder["prompt_token_ids"]
                changed = True
        if "token_ids" in holder:
            if index == 0 and not self._noted:
                seen.see_output_ids(holder["token_ids"])
            if not seen.wishes.output_ids:
                del holder["token_ids"]
                changed = True
        return changed

    def _read_on(self) -> None:
        """Read the message on from where it was left. Off the way of single events, which are not to wait for it."""
        if self._unread:
            events = sse.SSEParser().feed(b"".join(self._unread))
            for body in _objects([event.data for event in events if event.data is not None]):
                if (text := _only_text(body)) is not None:
                    self._text.append(text)
                    continue
                for choice in _dicts(body.get("choices")):
                    if not choice.get("index"):
                        self._see_message(choice)
            self._unread = []
            self._num_unread = 0

    def _see_message(self, choice: Mapping[str, Any]) -> None:
        """What a first choice says."""
        said = choice.get("message") or choice.get("delta") or choice
        if not isinstance(said, dict):
            return
        if isinstance(text := said.get("content"), str):
            self._text.append(text)
        if isinstance(text := said.get("text"), str):
            self._text.append(text)
        if calls := said.get("tool_calls"):
            self._see_calls(calls)

    def _see_calls(self, calls: object) -> None:
        for position, call in enumerate(_dicts(calls)):
            if isinstance(function := call.get("function"), dict):
                index = call.get("index", position)
                known = self._calls.setdefault(index if isinstance(index, int) else position, {})
                for key in ("name", "arguments"):
                    if isinstance(part := function.get(key), str):
                        known[key] = known.get(key, "") + part


def _only_text(body: Mapping[str, Any]) -> str | None:
    """The text of an event that has nothing else, of a first choice: what most events of a chat are."""
    try:
        [choice] = body["choices"]
        delta = choice["delta"]
        if choice["index"] == 0 and len(delta) == 1 and type(text := delta["content"]) is str:
            return text
    except (KeyError, TypeError, ValueError):
        pass
    return None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _objects(events: Sequence[bytes]) -> list[dict[str, Any]]:
    """Those of the events that are JSON objects; all are read in one go unless something among them is no JSON."""
    try:
        return _dicts(orjson.loads(b"[" + b",".join(events) + b"]"))
    except ValueError:
        return _dicts([_value(event) for event in events])


def _value(event: bytes) -> object:
    try:
        return jsontext.loads(event)
    except ValueError:
        return None

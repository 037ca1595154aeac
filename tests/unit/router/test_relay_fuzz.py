"""Streams no engine would write in one go: whatever is in them and however they are cut, the client gets their bytes.

The generator knows of each event whether it holds what is not the client's, and what must be left of it; so what it
expects is not the relay's own opinion.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from connectors.wire import sse
from router import jsontext
from router.answer import Answer, ChoicesAnswer, Wishes
from router.relay import StreamRelay
from router.response_answer import ResponseAnswer

STREAMS_PER_PART = 1250
PARTS = range(8)
BOM = b"\xef\xbb\xbf"
LINE_ENDS = ("\n", "\n", "\r\n", "\r")
TEXTS = (
    *("Grüß", "👋", "漢字", "", " ", "a\\b", 'say "token_note"', "\u2028", "\x85", "\r\n\r\n", "\n\ndata: {}\n\n"),
    *("token_note", "kv_transfer_params", "usage", '"usage": {"prompt_tokens": 9}', "[DONE]", "data: [DONE]"),
    *('{"kv_transfer_params": {"remote_host": "h"}}', "prompt_token_ids", '"finish_reason": "stop"', "\ud83d"),
)
PARAMS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": "e", "remote_num_tokens": 3}
INTERNAL_VALUES = (None, {}, PARAMS, {"remote_port": "odd"}, [], 5, "text")
NOTES = (None, {}, 5, {"prompt_token_ids": [1, 2], "num_cached_tokens": 1}, {"token_ids": [3, 4]}, {"token_ids": [-1]})
SECRET = ("kv_transfer_params", "ec_transfer_params", "token_note")
Json = dict[str, Any]


@dataclass
class Event:
    raw: bytes
    kept: list[str] | None = None
    """The lines beside the data, of an event that is changed; None for one that passes as it is."""
    left: Json | None = None
    """What a changed event says; None if it is left out."""


@dataclass
class Stream:
    events: list[Event] = field(default_factory=list)
    end: bytes = b""
    """What follows the events; never given on before the engine has said that it is over."""
    complete: bool = False

    @property
    def raw(self) -> bytes:
        return b"".join(event.raw for event in self.events) + self.end


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(4)))


def _choice(rng: random.Random) -> Json:
    said = _text(rng)
    choice: Json = {"index": rng.choice((0, 0, 0, 1, "odd"))}
    choice |= rng.choice(
        ({"delta": {"content": said}}, {"text": said}, {"delta": {"tool_calls": [{"function": said}]}})
    )
    if rng.random() < 0.2:
        choice["finish_reason"] = rng.choice((None, "stop"))
    if rng.random() < 0.1:
        choice["logprobs"] = {"token_note": 1, "content": [{"kv_transfer_params": said}]}  # deeper: the client's
    return choice


def _without(rng: random.Random, body: Json, *, usage: bool) -> tuple[Json, bool]:
    """The body with internal keys put in at random; and whether there are any."""
    internal = False
    if rng.random() < 0.15:
        body["kv_transfer_params"], internal = rng.choice(INTERNAL_VALUES), True
    if rng.random() < 0.05:
        body["ec_transfer_params"], internal = rng.choice(INTERNAL_VALUES), True
    if rng.random() < 0.15:
        body["token_note"], internal = rng.choice(NOTES), True
    if rng.random() < 0.1:
        body["usage"] = {"prompt_tokens": rng.randrange(1, 9), "completion_tokens": rng.randrange(9)}
        internal |= not usage
    return body, internal


def choices_event(rng: random.Random, usage: bool) -> tuple[Json, Json | None, bool]:
    """An event's JSON, what the client gets of it (None: nothing), and whether that is a change."""
    plain: Json = {"id": _text(rng), "choices": [_choice(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))]}
    body, internal = _without(rng, dict(plain), usage=usage)
    left = plain | ({"usage": body["usage"]} if usage and "usage" in body else {})
    only_usage = not plain["choices"] and "usage" in body and not usage
    return body, None if only_usage else left, internal


def response_event(rng: random.Random, usage: bool) -> tuple[Json, Json | None, bool]:
    kind = rng.choice(("response.output_text.delta", "response.created", "response.in_progress", "odd"))
    plain: Json = {"type": kind, "delta": _text(rng), "item": {"token_note": _text(rng)} if rng.random() < 0.1 else 1}
    body, internal = _without(rng, dict(plain), usage=True)
    left = plain | ({"usage": body["usage"]} if "usage" in body else {})
    if rng.random() < 0.3:
        inner: Json = {"id": _text(rng), "status": "in_progress", "output": []}
        dirty, inside = _without(rng, dict(inner), usage=True)
        body["response"] = dirty
        left["response"] = inner | ({"usage": dirty["usage"]} if "usage" in dirty else {})
        internal |= inside
    return body, left, internal


def _lines(rng: random.Random, text: str) -> list[str]:
    colon = rng.choice(("data: ", "data:"))
    if colon == "data:" and text.startswith(" "):
        colon = "data: "
    return [colon + line for line in text.split("\n")]


def _fields(rng: random.Random) -> list[str]:
    odd = ("event: ping", "id: 7", "retry: 10", ": comment", "dataset: x", "nothing", "event:", ": kv_transfer_params")
    return [rng.choice(odd) for _ in range(rng.choice((0, 0, 0, 1, 2)))]


def _assemble(rng: random.Random, lines: list[str]) -> bytes:
    """Lines and the blank one, with ends of every kind; a lone CR then LF would be one end, so it is not made."""
    out = ""
    for line in lines:
        end = rng.choice(LINE_ENDS)
        out += line + end
    blank = rng.choice(LINE_ENDS if end == "\r\n" else ("\n", "\r") if end == "\n" else ("\r",))
    return (out + blank).encode()


def make_stream(rng: random.Random, event_of: Callable[..., Any], usage: bool, ending: bytes | None) -> Stream:
    stream = Stream()
    for _ in range(rng.randrange(1, 9)):
        roll = rng.random()
        if roll < 0.1:
            stream.events.append(Event(_assemble(rng, [": keep-alive", *_fields(rng)])))
            continue
        if roll < 0.2:
            junk = rng.choice(
                ("not json", "[1, 2]", "5", "{", '{"usage": ', "null", '"token_note"', '{"a": NaN}', "{}")
            )
            stream.events.append(Event(_assemble(rng, [*_fields(rng), *_lines(rng, junk)])))
            continue
        body, left, internal = event_of(rng, usage)
        if rng.random() < 0.004:
            pad = "x" * rng.randrange(65_000, 140_000)
            body["pad"] = pad
            if left is not None:
                left["pad"] = pad
        if rng.random() < 0.1:
            body["odd"] = float("nan")
            if left is not None:
                left["odd"] = None  # which JSON has instead
        kept = _fields(rng)
        indent = rng.choice((None, None, None, 1))
        text = json.dumps(body, indent=indent, ensure_ascii=rng.random() < 0.3 or not _is_utf8(body))
        raw = _assemble(rng, [*kept, *_lines(rng, text)])
        stream.events.append(Event(raw, kept, left) if internal else Event(raw))
    if rng.random() < 0.2:
        stream.events[0].raw = BOM + stream.events[0].raw
    if ending is not None:
        stream.end, stream.complete = ending, True
    elif rng.random() < 0.5:
        stream.end = rng.choice(
            (b"data: {", b"data: [DO", b"id: 1\n", b": x\n", b'data: {"token_note": {}}\n', b"data")
        )
    if stream.raw.endswith(b"\r\n\r"):
        stream.end = b":"  # at the very end it might be half a line end, and is taken for that
    return stream


def _is_utf8(body: Json) -> bool:
    return "\ud83d" not in json.dumps(body, ensure_ascii=False)


def cut(rng: random.Random, raw: bytes) -> list[bytes]:
    if len(raw) < 2000 and rng.random() < 0.04:
        return [raw[at : at + 1] for at in range(len(raw))]
    edges = sorted({0, len(raw), *(rng.randrange(len(raw)) for _ in range(rng.randrange(1, 12)))})
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def relayed(answer: Answer, pieces: list[bytes]) -> tuple[bytes, bytes, StreamRelay]:
    relay = StreamRelay(answer)
    return b"".join(relay.feed(piece) for piece in pieces), relay.finish(), relay


def check(stream: Stream, out: bytes) -> None:
    at = 0
    for event in stream.events:
        if event.kept is None:
            assert out.startswith(event.raw, at), (event.raw, out[at : at + len(event.raw)])
            at += len(event.raw)
            continue
        if event.left is None:
            continue
        end = out.index(b"\n\n", at) + 2
        *kept, data = out[at:end].decode().split("\n")[:-2]
        assert kept == event.kept
        assert json.loads(data.removeprefix("data: "), parse_constant=lambda _: None) == event.left
        at = end
    assert out[at:] == b""


def seen(relay: StreamRelay) -> tuple[Any, ...]:
    told = relay.answer.seen
    ids = list(told.output_token_ids)
    facts = (told.params, told.prompt_token_ids, ids, told.num_cached_tokens, told.usage, told.finished, told.error)
    return (*facts, told.output_ids_complete, relay.answer.message, relay.done, relay.complete)


DONES = (
    b"data: [DONE]\n\n",
    b"data: [DONE]\r\n\r\n",
    b"data:[DONE]\r\r",
    b"data: [DONE]",
    b"data: [DONE]\n",
    b"id: 1\ndata: [DONE]\r",
)
COMPLETED = (
    b'event: response.completed\r\ndata: {"type":"response.completed","response":{"status":"completed"}}\r\n\r\n'
)


@pytest.mark.parametrize("part", PARTS)
def test_any_stream_in_any_pieces(part: int) -> None:
    rng = random.Random(part)
    for number in range(STREAMS_PER_PART):
        usage, responses = rng.random() < 0.5, number % 3 == 0
        ending = None if rng.random() < 0.2 else COMPLETED if responses else rng.choice(DONES)

        def fresh(usage: bool = usage, number: int = number, responses: bool = responses) -> Answer:
            return ResponseAnswer(Wishes()) if responses else ChoicesAnswer(Wishes(usage=usage), noted=number % 2 == 0)

        stream = make_stream(rng, response_event if responses else choices_event, usage or responses, ending)
        out, end, relay = relayed(fresh(), [stream.raw])
        check(stream, out)
        assert relay.complete == stream.complete
        if not stream.complete:
            assert b'"code":502' in end or b'"code":"502"' in end
        elif stream.end.endswith((b"\n\n", b"\r\r", b"\r\n\r\n")):
            assert end == stream.end
        else:
            assert end == sse.DONE_EVENT
        again, again_end, other = relayed(fresh(), cut(rng, stream.raw))
        assert (again, again_end) == (out, end)
        assert seen(other) == seen(relay)


def test_lone_surrogates_and_nan_survive_being_written_anew() -> None:
    event = rb'data: {"t": "\ud83d", "n": NaN, "token_note": {}}' + b"\n\n"
    out, _, _ = relayed(ChoicesAnswer(Wishes(), noted=True), [event])
    assert jsontext.loads(out.removeprefix(b"data: "))["t"] == "\ud83d"
    assert b"token_note" not in out


@pytest.mark.parametrize("noted", [True, False])
def test_bytes_that_are_no_text_do_not_hide_what_is_not_the_clients(noted: bool) -> None:
    event = b'data: {"t": "\xf0\x9f", "kv_transfer_params": {"remote_host": "h"}}\n\n'
    out, _, _ = relayed(ChoicesAnswer(Wishes(), noted=noted), [event])
    assert b"remote_host" not in out
    assert b'"t"' in out

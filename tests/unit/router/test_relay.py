"""What the client gets of an engine's answer, and what the router learns from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.wire import sse
from connectors.wire.ids import TokenIds
from router.answer import READ_AHEAD_BYTES, ChoicesAnswer, Wishes
from router.relay import StreamRelay
from router.response_answer import ResponseAnswer
from tests.stub_engine import OUTPUT_IDS, PROMPT_IDS, TEXT, StubEngine

DATA = Path(__file__).parents[2] / "data"
RECORDED = (DATA / "vllm_decode_stream.sse").read_bytes()
INTERNAL = ("kv_transfer_params", "ec_transfer_params", "prompt_token_ids", "token_ids", "remote_")


def answer_for(keep_token_ids: bool, keep_usage: bool) -> ChoicesAnswer:
    """Of an engine that is not ours: ids come with every event."""
    return ChoicesAnswer(Wishes(keep_token_ids, keep_token_ids, keep_usage), noted=False)


def relayed(
    stream: list[bytes], *, keep_token_ids: bool = False, keep_usage: bool = False
) -> tuple[bytes, ChoicesAnswer]:
    relay = StreamRelay(answer_for(keep_token_ids, keep_usage))
    out = b"".join(relay.feed(chunk) for chunk in stream)
    return out + relay.finish(), relay.answer


def events(stream: bytes) -> list[Any]:
    found = [event.data for event in sse.SSEParser().feed(stream) if event.data]
    return [data.decode() if data == sse.DONE else json.loads(data) for data in found]


def stub_stream(*, chat: bool = True, **body: Any) -> bytes:
    asked = {"return_token_ids": True, "kv_transfer_params": {"do_remote_prefill": True}, **body}
    prompt = {"messages": []} if chat else {"prompt": ""}
    return b"".join(StubEngine("decode", url="http://127.0.0.1:8200").events({**asked, **prompt}))


def test_recorded_stream() -> None:
    out, answer = relayed([RECORDED])
    assert not any(name.encode() in out for name in INTERNAL)
    seen, sent = events(out), events(RECORDED)
    assert len(seen) == len(sent) - 1, "all but the usage chunk, which nobody asked for"
    assert seen[-1] == "[DONE]"
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in seen[:-1])
    assert text == answer.message["content"]
    assert text.startswith("The quick brown fox")
    assert answer.seen.prompt_token_ids == TokenIds.of(sent[0]["prompt_token_ids"])
    assert len(answer.seen.output_token_ids) == 24
    assert answer.seen.output_ids_complete
    assert answer.seen.usage.prompt == 638
    assert answer.seen.finished


def test_recorded_stream_with_everything_asked_for_is_untouched() -> None:
    out, answer = relayed([RECORDED], keep_token_ids=True, keep_usage=True)
    assert out == RECORDED
    assert len(answer.seen.output_token_ids) == 24


def test_recorded_answer_in_one_piece() -> None:
    body = json.loads((DATA / "vllm_decode_answer.json").read_text())
    whole = json.loads(json.dumps(body))
    answer = answer_for(False, True)
    assert answer.take(body)
    assert not any(name in json.dumps(body) for name in INTERNAL)
    for gone in ("kv_transfer_params", "ec_transfer_params", "prompt_token_ids"):
        whole.pop(gone)
    del whole["choices"][0]["token_ids"]
    assert body == whole
    assert answer.seen.params is not None
    assert answer.seen.params.remote_num_tokens == 813
    assert len(answer.seen.output_token_ids) == answer.seen.usage.completion == 56
    assert answer.seen.output_ids_complete
    assert answer.message["content"] == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("pieces", ["cut", "bytes"])
def test_cut_at_every_offset_client_and_router_see_the_same(chat: bool, pieces: str) -> None:
    stream = stub_stream(chat=chat, stream_options={"include_usage": True})
    expected, first = relayed([stream])
    assert first.message["content"] == TEXT
    splits = (
        [[stream[:cut], stream[cut:]] for cut in range(1, len(stream))]
        if pieces == "cut"
        else [[bytes([byte]) for byte in stream]]
    )
    for split in splits:
        out, answer = relayed(split)
        assert out == expected
        assert answer.seen.params == first.seen.params
        assert list(answer.seen.output_token_ids) == OUTPUT_IDS
        assert answer.seen.prompt_token_ids == TokenIds.of(PROMPT_IDS)


@given(st.lists(st.integers(1, len(RECORDED) - 1), max_size=20))
@settings(max_examples=50)
def test_recorded_stream_cut_in_many_places(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(RECORDED)]
    split = [RECORDED[a:b] for a, b in itertools.pairwise(edges)]
    assert relayed(split)[0] == relayed([RECORDED])[0]


def test_every_event_leaves_with_the_read_that_completes_it() -> None:
    relay = StreamRelay(answer_for(False, False))
    parts = [event.raw for event in sse.SSEParser().feed(stub_stream())]
    assert [bool(relay.feed(part)) for part in parts] == [True] * (len(parts) - 1) + [False]
    assert relay.finish() == sse.DONE_EVENT


UNTOUCHED = [
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data:{"choices" : [ {"delta":{"content":"\\u00e9"}} ]}\r\n\r\n',
    b": keep-alive\n\n",
    b"event: ping\ndata: {}\n\n",
    b"data: not json\n\n",
    b"data: [1, 2]\n\n",
    b'data: {"choices":[],"usage":null}\n\n',
    b'data: {"error":{"message":"m","code":500}}\n\n',
]


@pytest.mark.parametrize("event", UNTOUCHED)
def test_event_with_nothing_internal_is_passed_byte_for_byte(event: bytes) -> None:
    relay = StreamRelay(answer_for(False, True))
    assert relay.feed(event) == event


@pytest.mark.parametrize(
    ("event", "kept"),
    [
        ({"choices": [], "kv_transfer_params": None}, {"choices": []}),
        ({"choices": [], "ec_transfer_params": {"h": {}}}, {"choices": []}),
        ({"prompt_token_ids": [1], "x": 1}, {"x": 1}),
        ({"choices": [{"index": 1, "token_ids": [1], "text": "t"}]}, {"choices": [{"index": 1, "text": "t"}]}),
        ({"choices": [{"prompt_token_ids": None, "text": "t"}]}, {"choices": [{"text": "t"}]}),
        ({"choices": [{"text": "t"}], "usage": {"prompt_tokens": 1}}, {"choices": [{"text": "t"}]}),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, None),
        ({"choices": "odd", "kv_transfer_params": {}}, {"choices": "odd"}),
        ({"choices": [5, None], "kv_transfer_params": {}}, {"choices": [5, None]}),
    ],
)
def test_removal(event: dict[str, Any], kept: dict[str, Any] | None) -> None:
    out = StreamRelay(answer_for(False, False)).feed(sse.event(event))
    assert events(out) == ([] if kept is None else [kept])


def test_numbers_no_json_library_agrees_on_do_not_leak_params() -> None:
    relay = StreamRelay(answer_for(False, False))
    out = relay.feed(b'data: {"logprob": NaN, "t": "\\ud800", "kv_transfer_params": {"remote_host": "h"}}\n\n')
    assert b"remote_host" not in out
    assert b"\\ud800" in out


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ([{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 6}}], 6),
        ([{"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 6}}], 6),
        ([{"usage": {"completion_tokens": 5}}, {"choices": [], "usage": {"completion_tokens": 6}}], 6),
        ([{"usage": {"completion_tokens": 6}}, {"usage": None}, {"usage": {"completion_tokens": 0}}], 6),
    ],
    ids=["own chunk", "finish chunk", "both: the last", "null and zero never overwrite"],
)
def test_usage_wherever_an_engine_puts_it(layout: list[dict[str, Any]], expected: int) -> None:
    _, answer = relayed([sse.event(event) for event in layout] + [sse.DONE_EVENT])
    assert answer.seen.usage.completion == expected


@pytest.mark.parametrize(
    ("reason", "finished"), [("stop", True), ("length", True), ("tool_calls", True), ("abort", False), ("error", False)]
)
def test_answer_that_the_engine_broke_off_is_not_finished(reason: str, finished: bool) -> None:
    _, answer = relayed([sse.event({"choices": [{"index": 0, "finish_reason": reason}]}), sse.DONE_EVENT])
    assert answer.seen.finished is finished


def test_tool_calls_are_put_together() -> None:
    deltas = [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    _, answer = relayed([sse.event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas])
    assert answer.message["tool_calls"] == [
        {"function": {"name": "f", "arguments": '{"a":1}'}},
        {"function": {"name": "g", "arguments": "{}"}},
    ]


def test_withheld_ids_are_noticed() -> None:
    hidden = {"choices": [], "usage": {"completion_tokens": 9}}
    _, answer = relayed([sse.event({"choices": [{"delta": {}, "token_ids": [1]}]}), sse.event(hidden)])
    assert not answer.seen.output_ids_complete


@pytest.mark.parametrize("ids", [[1, -1], [1, "2"], [2**40], [1.5]])
def test_ids_that_are_none_are_not_remembered(ids: list[Any]) -> None:
    _, answer = relayed([sse.event({"choices": [{"delta": {}, "token_ids": ids}]})])
    assert not answer.seen.output_ids_complete


@pytest.mark.parametrize("params", [{"remote_port": "x"}, {}, None, 5, {"do_remote_decode": True}])
def test_odd_params_are_removed_all_the_same(params: object) -> None:
    out, answer = relayed([sse.event({"choices": [], "kv_transfer_params": params})])
    assert b"kv_transfer_params" not in out
    assert answer.seen.params is None or answer.seen.params.to_json() == params


CUT = stub_stream()[: len(stub_stream()) // 2]


def test_cut_stream_ends_with_an_error_event() -> None:
    relay = StreamRelay(answer_for(False, False))
    out = relay.feed(CUT) + relay.finish()
    assert not relay.complete
    *before, last = events(out)
    assert last["error"]["code"] == 502
    assert all("choices" in event for event in before)


@pytest.mark.parametrize("done", [True, False])
def test_engines_own_error_is_passed_once(done: bool) -> None:
    error = sse.event({"error": {"message": "KV load failed", "code": 500}})
    relay = StreamRelay(answer_for(False, False))
    out = relay.feed(CUT[: CUT.rindex(b"\n\n") + 2] + error + (sse.DONE_EVENT if done else b"")) + relay.finish()
    assert out.count(b'"error"') == 1
    assert out.endswith(sse.DONE_EVENT if done else error)
    assert not relay.complete


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n"])
def test_end_without_a_blank_line_counts(end: bytes) -> None:
    relay = StreamRelay(answer_for(False, False))
    relay.feed(stub_stream().removesuffix(sse.DONE_EVENT) + end)
    assert relay.finish() == sse.DONE_EVENT
    assert relay.complete


def test_nothing_follows_the_end() -> None:
    out, _ = relayed([stub_stream() + b'data: {"late":1}\n\n'])
    assert out.endswith(sse.DONE_EVENT)
    assert b"late" not in out


def test_events_that_must_all_be_read_are_not_kept() -> None:
    answer = answer_for(False, False)
    for number in range(1000):
        answer.take({"choices": [{"delta": {"content": "a"}, "token_ids": [number]}]})
        assert not answer._unread
    assert answer.message["content"] == "a" * 1000


def test_events_that_need_not_be_read_are_kept_within_bounds() -> None:
    answer = answer_for(False, False)
    relay = StreamRelay(answer)
    event = sse.event({"choices": [{"index": 0, "delta": {"content": "a"}}]})
    chunk = 100 * event
    for _ in range(100):
        assert relay.feed(chunk) == chunk
        assert sum(map(len, answer._unread)) < READ_AHEAD_BYTES
    assert answer.message["content"] == "a" * 10_000


def test_cached_tokens_of_any_choice_are_not_the_clients() -> None:
    relay = StreamRelay(ChoicesAnswer(Wishes(True, True), noted=True))
    event = {"choices": [{"index": 1, "delta": {"role": "assistant"}}], "prompt_token_ids": [1], "num_cached_tokens": 1}
    (told,) = events(relay.feed(sse.event(event)))
    assert told == {"choices": event["choices"], "prompt_token_ids": [1]}


@pytest.mark.parametrize(
    ("status", "details", "finished"),
    [
        ("completed", None, True),
        ("incomplete", {"reason": "max_output_tokens"}, True),
        ("incomplete", {"reason": None}, False),
        ("incomplete", None, False),
        ("failed", None, False),
    ],
)
def test_response_that_was_aborted_is_not_finished(status: str, details: object, finished: bool) -> None:
    answer = ResponseAnswer(Wishes())
    response = {"status": status, "incomplete_details": details, "output": []}
    StreamRelay(answer).feed(sse.event({"type": f"response.{status}", "response": response}))
    assert answer.ended
    assert answer.seen.finished is finished

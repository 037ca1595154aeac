"""/v1/responses over real HTTP: answers, streams, and what both have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.api.responses_answer import ResponseOutput
from engine.formats.base import CallDelta, Piece
from engine.messages import Output
from engine.request import Request
from tests.tiny import IM_END
from tests.unit.server.double import Stage
from tests.unit.server.responding import (
    CALL,
    IDS_AND_TIMES,
    RESPONSES,
    WEATHER,
    WHOLE,
    answers,
    events_of,
    use_format,
    whole,
    without,
)


@pytest.fixture
async def stage(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model) as stage:
        use_format(stage)
        yield stage


async def test_answer_of_text(stage: Stage) -> None:
    stage.script = answers(stage, "hello there", finish_reason="stop")
    answer = await whole(stage, instructions="be brief", metadata={"a": "b"}, temperature=0.5, store=True)
    (message,) = answer["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "hello there", "annotations": [], "logprobs": []}]
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny")
    assert (answer["error"], answer["incomplete_details"], answer["store"]) == (None, None, False)
    assert (answer["instructions"], answer["metadata"], answer["temperature"]) == ("be brief", {"a": "b"}, 0.5)
    (request,) = stage.submitted
    tokens = len(stage.tokenizer.encode("hello there", add_special_tokens=False)) + 1
    assert answer["usage"] == {
        "input_tokens": request.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": request.num_prompt_tokens + tokens,
    }
    assert not {"kv_transfer_params", "prompt_token_ids", "token_ids"} & answer.keys()


async def test_answer_with_thoughts_text_and_calls(stage: Stage) -> None:
    stage.script = answers(stage, WHOLE, finish_reason="stop")
    answer = await whole(stage, tools=[WEATHER])
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so, Rome"}]
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (first["name"], orjson.loads(first["arguments"])) == ("weather", {"city": "Rome"})
    assert first["call_id"] != second["call_id"]
    thoughts = len(stage.tokenizer.encode("so, Rome", add_special_tokens=False))
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == pytest.approx(thoughts, abs=2)


async def test_answer_cut_short_is_incomplete(stage: Stage) -> None:
    stage.script = answers(stage, "<think>hm</think>on and on")
    answer = await whole(stage, max_output_tokens=9)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert answer["max_output_tokens"] == stage.submitted[0].sampling.max_tokens == 9


async def test_stream_opens_and_closes_every_part(stage: Stage) -> None:
    stage.script = answers(stage, WHOLE, finish_reason="stop")
    events = await events_of(stage, {"tools": [WEATHER]})
    kinds = [event["type"].removeprefix("response.") for event in events]
    in_order = [kind for index, kind in enumerate(kinds) if kind != kinds[index - 1]]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert in_order == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    assert {e["response"]["status"] for e in events[:2]} == {"in_progress"}


@pytest.mark.parametrize(
    ("kind", "text_of"),
    [
        ("output_text", lambda item: item["content"][0]["text"]),
        ("reasoning_text", lambda item: item["content"][0]["text"]),
        ("function_call_arguments", lambda item: item["arguments"]),
    ],
)
async def test_joined_deltas_are_the_item(stage: Stage, kind: str, text_of: Any) -> None:
    stage.script = answers(stage, WHOLE, finish_reason="stop")
    events = await events_of(stage, {"tools": [WEATHER]})
    items = {item["id"]: item for item in events[-1]["response"]["output"]}
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"] == f"response.{kind}.delta":
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert deltas
    assert deltas == {item_id: text_of(items[item_id]) for item_id in deltas}
    for event in events:
        if event["type"] == f"response.{kind}.done":
            assert deltas[event["item_id"]] == event.get("text", event.get("arguments"))


TEXTS = ("hello world", WHOLE, "<think>only thoughts", f"{CALL}\n", "\n\n", f"a<tool_cal b{CALL}c", "é <to ü")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_stream_ends_with_what_the_whole_answer_says_however_it_is_cut(stage: Stage, data: Any) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    cuts = data.draw(st.sets(st.integers(1, 200)))
    end = data.draw(st.sampled_from(["stop", "length"]))
    body = {"tools": [WEATHER], "return_token_ids": True, "top_logprobs": 1}
    if data.draw(st.booleans()):
        body["stop"] = ["me se", "world!"]
    stage.script = answers(stage, text, finish_reason=end)
    answer = await whole(stage, **body)
    stage.script = answers(stage, text, cuts=cuts, finish_reason=end)
    events = await events_of(stage, body)
    assert events[-1]["type"] == f"response.{answer['status']}"
    ids = answer.pop("prompt_token_ids")
    assert events[0]["response"]["prompt_token_ids"] == ids
    assert without(events[-1]["response"], IDS_AND_TIMES) == without(answer, IDS_AND_TIMES)


async def test_ids_are_on_the_first_and_last_event_only(stage: Stage) -> None:
    stage.script = answers(stage, "hello there", finish_reason="stop")
    events = await events_of(stage, {"return_token_ids": True})
    (request,) = stage.submitted
    assert events[0]["response"]["prompt_token_ids"] == request.prompt_token_ids
    assert events[0]["response"]["num_cached_tokens"] == 3
    tokens = stage.tokenizer.encode("hello there", add_special_tokens=False)
    assert events[-1]["response"]["token_ids"] == [*tokens, IM_END]
    for event in events[1:-1]:
        assert b"token_ids" not in orjson.dumps(event)
    answer = await whole(stage, return_token_ids=True)
    assert answer["token_ids"] == [*tokens, IM_END]
    assert answer["prompt_token_ids"] == request.prompt_token_ids


async def test_the_routers_note_is_on_the_first_and_last_event(stage: Stage) -> None:
    stage.script = answers(stage, "hello", finish_reason="stop")
    events = await events_of(stage, {"token_note": True})
    assert set(events[0]["token_note"]) == {"prompt_token_ids", "num_cached_tokens"}
    assert set(events[-1]["response"]["token_note"]) == {"token_ids"}
    assert not any(b"token_note" in orjson.dumps(event) for event in events[1:-1])


async def test_the_prompts_ids_are_left_out_of_a_note_for_the_output(stage: Stage) -> None:
    stage.script = answers(stage, "hello", finish_reason="stop")
    events = await events_of(stage, {"token_note": "output"})
    assert set(events[0]["token_note"]) == {"num_cached_tokens"}
    assert set(events[-1]["response"]["token_note"]) == {"token_ids"}
    answer = await whole(stage, token_note="output")
    assert set(answer["token_note"]) == {"num_cached_tokens", "token_ids"}


async def test_transfer_params_are_at_the_top_or_within_the_last_event(tiny_model: Path) -> None:
    held = {"do_remote_decode": True, "do_remote_prefill": False}

    async with Stage(tiny_model, role="prefill", kv=True) as stage:
        use_format(stage)

        def script(request: Request) -> Iterable[Output]:
            assert request.kv_transfer_params is not None
            params = request.kv_transfer_params.with_(remote_block_ids=[[1]])
            yield Output(request.request_id, [72])
            yield Output(request.request_id, [73], "length", kv_transfer_params=params)

        stage.script = script
        body = {"kv_transfer_params": held, "max_output_tokens": 2}
        answer = await whole(stage, **body)
        assert answer["kv_transfer_params"] == held | {"remote_block_ids": [[1]]}
        events = await events_of(stage, body)
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["kv_transfer_params"] == answer["kv_transfer_params"]
        assert not any(b"transfer_params" in orjson.dumps(event) for event in events[:-1])


async def test_required_call_is_held_to_a_grammar(stage: Stage) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        stage.script = answers(stage, CALL, finish_reason="stop")
        answer = await whole(stage, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        assert answer["tool_choice"] == choice
        assert answer["parallel_tool_calls"] is False
        assert stage.submitted[-1].sampling.grammar is not None
    stage.script = answers(stage, CALL, finish_reason="stop")
    answer = await whole(stage, tools=[WEATHER], tool_choice="none")
    assert stage.submitted[-1].sampling.grammar is None
    assert answer["output"][0]["content"][0]["text"] == CALL


@pytest.mark.parametrize(
    "asked", [{"include": ["message.output_text.logprobs"], "top_logprobs": 1}, {"top_logprobs": 1}]
)
async def test_logprobs_are_those_of_the_text(stage: Stage, asked: dict[str, Any]) -> None:
    stage.script = answers(stage, f"<think>so, Rome</think>Let é me see.{CALL}", finish_reason="stop")
    events = await events_of(stage, {"tools": [WEATHER]} | asked)
    part = events[-1]["response"]["output"][1]["content"][0]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"] == "Let é me see."
    assert [entry["top_logprobs"][0]["logprob"] for entry in part["logprobs"]] == [-0.5] * len(part["logprobs"])
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for entries in deltas for entry in entries] == part["logprobs"]


async def test_stop_string_ends_the_answer(stage: Stage) -> None:
    stage.script = lambda request: [
        Output(request.request_id, [token]) for token in stage.tokenizer.encode("one two", add_special_tokens=False)
    ]
    answer = await whole(stage, stop="e t")
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", "on")


async def test_failure_before_the_first_token_has_its_own_status(stage: Stage) -> None:
    stage.script = lambda request: [Output(request.request_id, [], "error", error="no", error_status=400)]
    status, answer = await stage.post(RESPONSES, {"input": "hi", "stream": True})
    assert (status, answer["error"]["message"]) == (400, "no")


async def test_answer_without_anything_to_show(stage: Stage) -> None:
    stage.script = lambda request: [Output(request.request_id, [IM_END], "stop")]
    assert (await whole(stage))["output"] == []
    events = await events_of(stage, {})
    assert [e["type"] for e in events] == ["response.created", "response.in_progress", "response.completed"]


async def test_second_call_is_not_heard_if_there_may_be_one_only(stage: Stage) -> None:
    stage.script = answers(stage, WHOLE, finish_reason="stop")
    body = {"tools": [WEATHER], "parallel_tool_calls": False}
    answer = await whole(stage, **body)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert without((await events_of(stage, body))[-1]["response"], IDS_AND_TIMES) == without(answer, IDS_AND_TIMES)


def test_one_token_may_end_a_call_and_go_on() -> None:
    pieces = iter(
        [
            Piece(calls=(CallDelta(0, "{", "call_a", "f"),)),
            Piece(content="then", calls=(CallDelta(0, "}"), CallDelta(1, "{}", "call_b", "g"))),
            Piece(),
        ]
    )

    class Scripted:
        def push(self, text: str, token_ids: Sequence[int]) -> Piece:
            return next(pieces)

        def end(self) -> Piece:
            return next(pieces)

    output = ResponseOutput(Scripted(), lambda token_id: b"x", parallel=True)
    events = output.push(["a", "b"], [1, 2], []) + output.end("completed")
    assert [(item.get("name"), item.get("arguments")) for item in output.items] == [
        ("f", "{}"),
        (None, None),
        ("g", "{}"),
    ]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == output.items


def test_answer_of_white_space_is_a_message() -> None:
    class Plain:
        def push(self, text: str, token_ids: Sequence[int]) -> Piece:
            return Piece(content=text)

        def end(self) -> Piece:
            return Piece()

    output = ResponseOutput(Plain(), lambda token_id: b" ", parallel=True)
    assert output.push([" ", " "], [1, 1], []) == []
    assert output.end("completed")
    assert output.items[0]["content"][0]["text"] == "  "


async def test_render_gives_the_body_for_generate(stage: Stage) -> None:
    body = {"input": "hi", "instructions": "be brief", "tools": [WEATHER], "tool_choice": "required", "seed": 7}
    status, rendered = await stage.post(f"{RESPONSES}/render", body | {"max_output_tokens": 5})
    assert status == 200, rendered
    stage.script = answers(stage, CALL)
    await whole(stage, **body)
    (request,) = stage.submitted
    assert rendered["token_ids"] == request.prompt_token_ids
    sampling = rendered["sampling_params"]
    assert (sampling["max_tokens"], sampling["seed"]) == (5, 7)
    assert request.sampling.grammar is not None
    assert sampling["structured_outputs"] == {"grammar": request.sampling.grammar.source}
    status, _ = await stage.post(f"{RESPONSES}/render", body | {"previous_response_id": "resp_1"})
    assert status == 404


async def test_tokenize_takes_what_a_prompt_is_made_of(stage: Stage) -> None:
    body = {"input": [{"role": "user", "content": "hi"}], "instructions": "be brief", "tools": [WEATHER]}
    status, answer = await stage.post("/tokenize", body)
    await whole(stage, **body)
    assert (status, answer["tokens"]) == (200, stage.submitted[0].prompt_token_ids)
    status, answer = await stage.post("/tokenize", {"input": [{"role": "user"}]})
    assert (status, answer["error"]["param"]) == (400, "input[0].content")

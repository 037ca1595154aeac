"""/inference/v1/generate: ids in, ids out."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from engine.logprobs import TokenLogprobs
from engine.messages import Output
from engine.request import Request
from tests.unit.server.double import MAX_MODEL_LEN, Stage, byte_ids, params_for_decode, says

GENERATE = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": byte_ids("hi")}


def ids_of(events: list[Any]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def logprobs(text: str) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, 1, ((token, -0.5), (0, float("-inf")))) for token in byte_ids(text)]


async def test_answer_in_one_piece(stage: Stage) -> None:
    status, answer = await stage.post(GENERATE, BODY, headers={"X-Request-Id": "mine"})
    assert status == 200
    assert (answer["request_id"], answer["model"], answer["output_mode"]) == ("mine", "tiny", "tokens")
    assert answer["choices"] == [
        {
            "index": 0,
            "token_ids": byte_ids("hello"),
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 5
    assert "prompt_token_ids" not in answer
    (request,) = stage.submitted
    assert request.prompt_token_ids == byte_ids("hi")
    assert request.request_id.startswith("generate-tokens-mine-")
    assert stage.tokenizer.calls == 0


async def test_stream_has_ids_then_finish_then_usage(stage: Stage) -> None:
    events = await stage.stream(GENERATE, BODY | {"stream_options": {"include_usage": True}, "request_id": "mine"})
    assert ids_of(events) == byte_ids("hello")
    finishes = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(event["output_mode"] == "tokens" and event["request_id"] == "mine" for event in events)
    assert all("usage" not in event for event in events[:-1])


async def test_usage_on_every_event_if_asked_for(stage: Stage) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stage.stream(GENERATE, BODY | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [5, 5]


async def test_without_max_tokens_the_answer_may_fill_the_context(stage: Stage) -> None:
    for sampling, expected in (
        ({}, MAX_MODEL_LEN - 2),
        ({"max_tokens": None}, MAX_MODEL_LEN - 2),
        ({"max_tokens": 7}, 7),
    ):
        assert (await stage.post(GENERATE, BODY | {"sampling_params": sampling}))[0] == 200
        assert stage.submitted[-1].sampling.max_tokens == expected


async def test_sampling_params_are_nested(stage: Stage) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop_token_ids": [7], "skip_special_tokens": False}
    status, _ = await stage.post(GENERATE, BODY | {"sampling_params": sampling, "temperature": 0.1})
    assert status == 200
    taken = stage.submitted[0].sampling
    assert (taken.temperature, taken.top_p, taken.seed, taken.stop_token_ids) == (0.5, 0.9, 3, frozenset([7]))
    assert not taken.skip_special_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [1, True]}, "token_ids[1]"),
        ({"token_ids": [320]}, "token_ids"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"token_ids": [0] * MAX_MODEL_LEN}, "token_ids"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"use_beam_search": True}}, "sampling_params.use_beam_search"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
        ({"sampling_params": {"extra_args": 3}}, "extra_args"),
        ({"output_mode": "picture"}, "output_mode"),
        ({"output_mode": "derender", "stream": True}, "output_mode"),
        ({"output_mode": "derender", "parse_context": {"strange": 1}}, "parse_context.strange"),
        ({"output_mode": "derender", "parse_context": {"tools": 1}}, "tools"),
        ({"parse_context": 1}, "parse_context"),
        ({"features": 5}, "features"),
        ({"features": {"mm_hashes": {}}}, "features.mm_metadata"),
        ({"features": {"mm_hashes": {"image": ["a"]}, "mm_metadata": {}}}, "features"),
        ({"content_parts": [{}]}, "content_parts"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"request_id": 1}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"priority": "high"}, "priority"),
    ],
)
async def test_bad_bodies_are_refused_naming_the_field(stage: Stage, change: dict[str, Any], param: str) -> None:
    status, answer = await stage.post(GENERATE, BODY | change)
    assert (status, answer["error"]["param"]) == (400, param)
    assert stage.submitted == []


async def test_media_are_refused_in_words(stage: Stage) -> None:
    features = {"mm_hashes": {"image": ["a"]}, "mm_metadata": {"image": [{"rows": 0, "cols": 0}]}}
    _, answer = await stage.post(GENERATE, BODY | {"features": features})
    assert answer["error"]["message"] == "features: this model takes no pictures"


async def test_prompt_ids_are_told_once_and_only_if_asked_for(stage: Stage) -> None:
    events = await stage.stream(GENERATE, BODY | {"return_token_ids": True, "sampling_params": {"n": 2}})
    assert [event.get("prompt_token_ids") for event in events] == [byte_ids("hi")] + [None] * (len(events) - 1)
    assert events[0]["num_cached_tokens"] == 2
    assert all("num_cached_tokens" not in event for event in events[1:])
    _, answer = await stage.post(GENERATE, BODY | {"return_token_ids": True})
    assert answer["prompt_token_ids"] == byte_ids("hi")
    events = await stage.stream(GENERATE, BODY)
    assert all("prompt_token_ids" not in event for event in events)


async def test_outputs_without_tokens_are_skipped_but_the_last(stage: Stage) -> None:
    def script(request: Request) -> Iterable[Output]:
        yield Output(request.request_id, [])
        yield Output(request.request_id, byte_ids("a"))
        yield Output(request.request_id, [])
        yield Output(request.request_id, [], "length")

    stage.script = script
    events = await stage.stream(GENERATE, BODY | {"return_token_ids": True})
    told = [(event["choices"][0]["token_ids"], event["choices"][0]["finish_reason"]) for event in events]
    # A slow reader finds outputs merged, so all may have come as one.
    assert told in ([(byte_ids("a"), None), ([], "length")], [(byte_ids("a"), "length")])
    assert "prompt_token_ids" in events[0]


async def test_answer_without_any_token_still_ends(stage: Stage) -> None:
    stage.script = lambda request: [Output(request.request_id, [], "length")]
    (event,) = await stage.stream(GENERATE, BODY | {"return_token_ids": True})
    assert event["choices"][0] | {"token_ids": [], "finish_reason": "length"} == event["choices"][0]
    assert event["prompt_token_ids"] == byte_ids("hi")


async def test_several_answers(stage: Stage) -> None:
    status, answer = await stage.post(GENERATE, BODY | {"sampling_params": {"n": 3}})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 15} == answer["usage"]
    events = await stage.stream(GENERATE, BODY | {"sampling_params": {"n": 2}})
    for index in (0, 1):
        assert ids_of([e for e in events if e["choices"][0]["index"] == index]) == byte_ids("hello")


async def test_stop_strings_count_in_every_output_mode(stage: Stage) -> None:
    stage.script = lambda request: [Output(request.request_id, [token]) for token in byte_ids("one two")]
    for mode in ("tokens", "text"):
        body = BODY | {"output_mode": mode, "sampling_params": {"stop": ["e t"]}}
        _, answer = await stage.post(GENERATE, body)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == byte_ids("one t")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "e t")
        assert choice.get("text") == (None if mode == "tokens" else "on")
        last = (await stage.stream(GENERATE, body))[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "e t")


async def test_stop_token_is_told_by_its_id(stage: Stage) -> None:
    stage.script = says("hello!", finish_reason="stop", stop_token_id=byte_ids("!")[0])
    events = await stage.stream(GENERATE, BODY | {"sampling_params": {"stop_token_ids": byte_ids("!")}})
    assert events[-1]["choices"][0]["stop_reason"] == byte_ids("!")[0]
    assert ids_of(events) == byte_ids("hello!")


async def test_text_beside_the_ids(stage: Stage) -> None:
    _, answer = await stage.post(GENERATE, BODY | {"output_mode": "text"})
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["token_ids"] == byte_ids("hello")
    events = await stage.stream(GENERATE, BODY | {"output_mode": "text", "stream_options": {"include_usage": True}})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hello"
    assert ids_of(events) == byte_ids("hello")
    assert events[-1]["output_mode"] == "text"


async def test_message_beside_the_ids(stage: Stage) -> None:
    _, answer = await stage.post(GENERATE, BODY | {"output_mode": "derender", "parse_context": {"tools": []}})
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert choice["token_ids"] == byte_ids("hello")


async def test_logprobs_are_told_by_id(stage: Stage) -> None:
    def script(request: Request) -> Iterable[Output]:
        prompt = [None, *logprobs("i")]
        yield Output(request.request_id, byte_ids("a"), logprobs=logprobs("a"), prompt_logprobs=prompt)
        yield Output(request.request_id, byte_ids("b"), "length", logprobs=logprobs("b"))

    stage.script = script
    (a,), (b,), (i,) = byte_ids("a"), byte_ids("b"), byte_ids("i")
    body = BODY | {"sampling_params": {"logprobs": 2, "prompt_logprobs": 1}}

    def expected(token: int) -> dict[str, Any]:
        top = [{"token_id": token, "logprob": -0.5, "rank": 1}, {"token_id": 0, "logprob": -9999.0, "rank": 2}]
        return {"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": top}

    _, answer = await stage.post(GENERATE, body)
    assert stage.submitted[0].sampling.logprobs == 2
    assert answer["choices"][0]["logprobs"] == {"content": [expected(a), expected(b)]}
    assert answer["prompt_logprobs"] == [None, {str(i): {"logprob": -0.5, "rank": 1, "decoded_token": "i"}}]
    events = await stage.stream(GENERATE, body)
    told = [item for event in events for item in event["choices"][0]["logprobs"]["content"]]
    assert told == [expected(a), expected(b)]
    assert [event.get("prompt_logprobs") for event in events] == [answer["prompt_logprobs"]] + [None] * (
        len(events) - 1
    )


async def test_error_in_the_middle_is_an_event_before_done(stage: Stage) -> None:
    seen = threading.Event()

    def script(request: Request) -> Iterable[Output]:
        yield Output(request.request_id, byte_ids("a"))
        assert seen.wait(5)
        yield Output(request.request_id, [], "error", error="broken")

    stage.script = script
    async with stage.session.post(GENERATE, json=BODY | {"stream": True}) as response:
        assert response.status == 200
        assert b'"token_ids":' in await response.content.readuntil(b"\n\n")
        seen.set()
        rest = await response.read()
    assert rest.startswith(b'data: {"error":{"message":"broken"')
    assert rest.endswith(b"data: [DONE]\n\n")
    status, answer = await stage.post(GENERATE, BODY)
    assert (status, answer["error"]["message"]) == (500, "broken")


async def test_ids_of_the_router_are_not_for_this_endpoint(decode: Stage) -> None:
    status, _ = await decode.post(
        GENERATE, BODY | {"kv_transfer_params": params_for_decode(prompt_token_ids=[1, 2, 3])}
    )
    assert status == 200
    assert decode.submitted[0].prompt_token_ids == byte_ids("hi")
    assert decode.transport.released == []

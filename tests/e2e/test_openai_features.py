"""What an unchanged OpenAI client asks for beyond plain text, through the router, on real engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.support import Stack, post, wait_until

pytestmark = pytest.mark.model

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]
ASK: dict[str, Any] = {"temperature": 0, "max_tokens": 60}


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
async def aclient(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_function_is_called_and_its_result_goes_on(client: OpenAI, stack: Stack, choice: Any) -> None:
    messages = said("What is the weather in Oslo?")
    asked: dict[str, Any] = {"model": stack.model, "tools": TOOLS, "tool_choice": choice}
    if choice == "required":
        asked["parallel_tool_calls"] = False  # one that is named is called once anyway
    whole = client.chat.completions.create(messages=messages, **asked, **ASK)
    [call] = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name in ("get_weather", "get_time")
    assert isinstance(json.loads(call.function.arguments), dict)

    streamed = ""
    for chunk in client.chat.completions.create(messages=messages, stream=True, **asked, **ASK):
        for delta in chunk.choices[0].delta.tool_calls or []:
            streamed += (delta.function and delta.function.arguments) or ""
    assert streamed == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
    history = [*messages, whole.choices[0].message.to_dict(), result]
    after = client.chat.completions.create(
        model=stack.model, messages=history, tools=TOOLS, extra_headers={"X-Backhaul-Explain": "1"}, **ASK
    )
    assert after.choices[0].message.content is not None


def test_without_a_choice_of_tools_none_need_be_called(client: OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=said("Say hi."), tools=TOOLS, tool_choice="none", **ASK
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_an_answer_is_parsed_into_the_class_asked_for(client: OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.parse(
        model=stack.model, messages=said("A person, please."), response_format=Person, **ASK
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    response = client.responses.parse(
        model=stack.model, input="A person, please.", text_format=Person, temperature=0, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, Person)


@pytest.mark.parametrize(
    "constraint",
    [{"choice": ["left", "right"]}, {"regex": "[a-c]{3}"}, {"grammar": 'start: "yes" | "no"'}],
    ids=["choice", "regex", "grammar"],
)
def test_structured_outputs(client: OpenAI, stack: Stack, constraint: dict[str, Any]) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=said("Choose."), extra_body={"structured_outputs": constraint}, **ASK
    )
    text = answer.choices[0].message.content or ""
    allowed = constraint.get("choice") or ["yes", "no"]
    assert (len(text) == 3 and set(text) <= set("abc")) if "regex" in constraint else text in allowed


def test_log_probabilities_stand_beside_their_tokens(client: OpenAI, stack: Stack) -> None:
    asked: dict[str, Any] = {"model": stack.model, "messages": said("Hi"), "temperature": 0, "max_tokens": 5}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert whole.usage is not None
    assert len(told.content) == whole.usage.completion_tokens
    assert all(one.logprob == pytest.approx(one.top_logprobs[0].logprob) for one in told.content), (
        "greedy: the likeliest"
    )
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(**asked, logprobs=True, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == [one.token for one in told.content]


def test_several_answers_share_one_prefill(client: OpenAI, stack: Stack) -> None:
    before = stack.prefill.metrics(), stack.decode.metrics()
    prompt = "One of several. " + "apple river " * 100
    answer = client.chat.completions.create(
        model=stack.model, messages=said(prompt), n=3, temperature=1, seed=5, max_tokens=6
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    after = stack.prefill.metrics(), stack.decode.metrics()
    name = f'vllm:prompt_tokens_by_source_total{{model_name="{stack.model}",source="local_compute"}}'
    computed = [new.get(name, 0) - old.get(name, 0) for old, new in zip(before, after, strict=True)]
    assert computed[0] <= answer.usage.prompt_tokens, "prefilled once"
    assert computed[1] <= 3 * 16, "and on the decode engine at most a block for each answer"
    for engine in stack.engines:
        wait_until(lambda engine=engine: engine.metrics()["backhaul_engine_blocks_pinned"] == 0, 5, "none pinned")  # type: ignore[misc]


def test_a_response_streams_its_events(client: OpenAI, stack: Stack) -> None:
    asked: dict[str, Any] = {
        "model": stack.model,
        "input": "Count to three.",
        "temperature": 0,
        "max_output_tokens": 12,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert not any(key in event.to_json() for event in events for key in ("transfer_params", "token_note", "token_ids"))


def test_a_response_goes_on_from_the_items_of_the_last(stack: Stack) -> None:
    """The second turn is known, and what D holds is used: by ids and blocks, as in a chat."""
    asked: dict[str, Any] = {"model": stack.model, "temperature": 0, "max_output_tokens": 8, "store": False}
    items = [{"role": "user", "content": "Remember the number 7. " + "river apple " * 60}]
    client = OpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=60)
    first = client.responses.create(input=items, **asked)  # type: ignore[arg-type]
    more = [*items, *(item.to_dict() for item in first.output), {"role": "user", "content": "Which number?"}]
    answer = client.responses.with_raw_response.create(
        input=more,  # type: ignore[arg-type]
        extra_headers={"X-Backhaul-Explain": "1"},
        **asked,
    )
    headers = answer.headers
    assert headers["X-Backhaul-Turn"] == "2"
    assert first.usage is not None
    reused = int(headers["X-Backhaul-Tokens-Reused"]) + int(headers.get("X-Backhaul-Tokens-Pulled", 0))
    assert reused >= first.usage.input_tokens - 16


async def test_an_aborted_request_ends_with_what_it_has(aclient: AsyncOpenAI, stack: Stack) -> None:
    stream = await aclient.chat.completions.create(
        model=stack.model,
        messages=said("Count to a thousand."),
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"X-Request-Id": "to-be-aborted"},
    )
    reasons = []
    async for chunk in stream:
        if not reasons:
            body = {"request_ids": ["to-be-aborted"]}
            url = f"{stack.router}/inference/v1/abort_requests"
            told = await asyncio.to_thread(post, url, body, {"Authorization": "Bearer none"})
            assert told == {"aborted": 1}
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "abort"
    assert len(reasons) < 1000


async def test_an_aborted_answer_in_one_piece_has_what_was_made(aclient: AsyncOpenAI, stack: Stack) -> None:
    running = asyncio.create_task(
        aclient.chat.completions.create(
            model=stack.model,
            messages=said("Count to a million."),
            max_tokens=2000,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "whole"},
        )
    )
    busy = lambda: stack.decode.metrics()["vllm:num_requests_running"] == 1  # noqa: E731
    await asyncio.to_thread(wait_until, busy, 10, "the decode engine works on it")
    url = f"{stack.router}/inference/v1/abort_requests"
    for token, count in (("somebody", 0), ("none", 1)):
        told = await asyncio.to_thread(post, url, {"request_ids": ["whole"]}, {"Authorization": f"Bearer {token}"})
        assert told == {"aborted": count}
    answer = await running
    assert answer.choices[0].finish_reason == "abort"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 2000


async def test_a_client_that_leaves_ends_its_request(aclient: AsyncOpenAI, stack: Stack) -> None:
    stream = await aclient.chat.completions.create(
        model=stack.model,
        messages=said("Count to a million."),
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(aiter(stream))
    await stream.close()
    running = lambda: stack.decode.metrics()["vllm:num_requests_running"] == 0  # noqa: E731
    await asyncio.to_thread(wait_until, running, 2, "the decode engine works on nothing")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, 400, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, 400, None),
        ({"extra_body": {"kv_transfer_params": {"do_remote_prefill": True}}}, 200, None),
        ({"n": 0}, 400, "n"),
    ],
)
def test_errors_say_what_is_wrong(
    client: OpenAI, stack: Stack, body: dict[str, Any], status: int, param: str | None
) -> None:
    asked = {"model": stack.model, "messages": said("Hi"), "max_tokens": 3} | body
    if status == 200:
        assert client.chat.completions.create(**asked).choices
        return
    with pytest.raises(APIStatusError) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.status_code == status
    if param is not None:
        assert caught.value.param == param

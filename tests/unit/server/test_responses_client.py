"""/v1/responses as OpenAI's own client reads it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from engine.messages import Output
from engine.request import Request
from tests.unit.server.double import Stage
from tests.unit.server.responding import (
    WEATHER,
    WHOLE,
    answers,
    use_format,
)


@pytest.fixture
async def stage(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model) as stage:
        use_format(stage)
        yield stage


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_client_reads_whole_answers(stage: Stage, client: AsyncOpenAI) -> None:
    stage.script = answers(stage, WHOLE, finish_reason="stop")
    response = await client.responses.create(
        model="tiny", input="hi", tools=[WEATHER], reasoning={"effort": "low"}, include=["reasoning.encrypted_content"]
    )
    assert response.output_text.strip() == "Let me see."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"


async def test_client_reads_streams(stage: Stage, client: AsyncOpenAI) -> None:
    stage.script = answers(stage, WHOLE, finish_reason="stop")
    events = [event async for event in await client.responses.create(input="hi", tools=[WEATHER], stream=True)]
    for event in events:
        type(event).model_validate(event.to_dict())
    async with client.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text
    assert final.output[2].type == "function_call"
    assert final.output[2].parsed_arguments == {"city": "Rome"}


async def test_client_parses_structured_output(stage: Stage, client: AsyncOpenAI) -> None:
    class City(BaseModel):
        name: str

    use_format(stage, thinks=False)
    stage.script = answers(stage, '{"name": "Rome"}', finish_reason="stop")
    response = await client.responses.parse(model="tiny", input="hi", text_format=City)
    assert response.output_parsed == City(name="Rome")
    (request,) = stage.submitted
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.kind == "json_schema"
    assert request.matcher is not None
    async with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
        assert (await stream.get_final_response()).output_parsed == City(name="Rome")


async def test_client_raises_on_errors(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="stores none"):
        await client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="stores none"):
        await client.responses.cancel("resp_1")
    with pytest.raises(openai.NotFoundError, match="stores none"):
        await client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")


async def test_conversation_goes_on_from_output_items(stage: Stage, client: AsyncOpenAI) -> None:
    stage.script = answers(stage, "<think>hm</think>one", finish_reason="stop")
    first = await client.responses.create(model="tiny", input="hi")
    history = [{"role": "user", "content": "hi"}, *[item.to_dict() for item in first.output]]
    await client.responses.create(model="tiny", input=[*history, {"role": "user", "content": "on"}])
    prompt = stage.tokenizer.decode(stage.submitted[1].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\none<|im_end|>" in prompt


async def test_failure_in_a_stream_is_told_as_the_api_does(stage: Stage, client: AsyncOpenAI) -> None:
    begun = threading.Event()

    def script(request: Request) -> Iterable[Output]:
        yield Output(request.request_id, [72])
        assert begun.wait(10)
        yield Output(request.request_id, [], "error", error="the KV is gone")

    stage.script = script
    events = []
    async for event in await client.responses.create(model="tiny", input="hi", stream=True):
        events.append(event)
        begun.set()
    error, failed = events[-2:]
    assert (error.type, failed.type) == ("error", "response.failed")
    assert error.message == "the KV is gone"
    response = Response.model_validate(failed.response.to_dict())
    assert response.error is not None
    assert (response.status, response.error.message) == ("failed", "the KV is gone")
    assert response.output[0].status == "incomplete"

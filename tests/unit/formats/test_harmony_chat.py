"""Chats with a model that has the Harmony format, through the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.formats.base import FormatError
from engine.formats.choose import choose_format
from engine.formats.harmony import HarmonyFormat
from engine.formats.harmony_prompt import Marker
from engine.formats.template import TemplateFormat
from engine.messages import Output
from engine.request import Request
from engine.tokenizer_files import tokenizer_from_folder
from tests.harmony_model import IDS
from tests.unit.server.double import Script, Stage, params_for_decode

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES = [{"role": "user", "content": "hi"}]
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.fixture
async def stage(harmony_model: Path) -> AsyncIterator[Stage]:
    async with Stage(harmony_model, max_model_len=2048) as stage:
        yield stage


@pytest.fixture
async def decode(harmony_model: Path) -> AsyncIterator[Stage]:
    async with Stage(harmony_model, role="decode", kv=True) as stage:
        yield stage


def says(stage: Stage, answer: str, ends: Marker) -> Script:
    """Answer with these tokens, one at a time, and end with a stop token."""
    tokens = [*stage.tokenizer.encode(answer, add_special_tokens=False), IDS[ends]]

    def script(request: Request) -> Iterable[Output]:
        for token in tokens[:-1]:
            yield Output(request.request_id, [token])
        yield Output(request.request_id, tokens[-1:], "stop", stop_token_id=tokens[-1])

    return script


async def test_chat_answers_with_thoughts_and_content(stage: Stage) -> None:
    stage.script = says(stage, THOUGHT + "<|channel|>final<|message|>Hello.", Marker.RETURN)
    status, answer = await stage.chat(reasoning_effort="low")
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Hello.")
    assert choice["finish_reason"] == "stop"
    (request,) = stage.submitted
    prompt = stage.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert "Reasoning: low" in prompt
    assert prompt.endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert request.sampling.stop_token_ids == {IDS[Marker.RETURN], IDS[Marker.CALL]}


async def test_stream_tells_of_a_call_as_its_arguments_come(stage: Stage) -> None:
    call = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "utc"}'
    stage.script = says(stage, THOUGHT + call, Marker.CALL)
    events = await stage.stream(CHAT, {"messages": MESSAGES, "tools": TOOLS})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert not any(delta.get("content") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "id" in call] == ["clock"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"zone": "utc"}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_the_router_are_used_and_their_answer_parsed(decode: Stage, stream: bool) -> None:
    decode.script = says(decode, "<|channel|>final<|message|>Hello.", Marker.RETURN)
    ids = decode.tokenizer.encode("<|start|>user<|message|>hi<|end|><|start|>assistant", add_special_tokens=False)
    params = params_for_decode(prompt_token_ids=ids, remote_num_tokens=len(ids))
    before = decode.tokenizer.calls
    body: dict[str, Any] = {"messages": MESSAGES, "reasoning_effort": "no such", "kv_transfer_params": params}
    if stream:
        events = await decode.stream(CHAT, body)
        content = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    else:
        _, answer = await decode.post(CHAT, body)
        content = answer["choices"][0]["message"]["content"]
    assert content == "Hello."
    assert decode.tokenizer.calls == before
    assert decode.submitted[0].prompt_token_ids == ids


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"reasoning_effort": "extreme"}, "low, medium or high expected"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages[0].tool_call_id"),
    ],
)
async def test_chat_refuses_what_the_format_has_no_place_for(
    stage: Stage, fields: dict[str, Any], complaint: str
) -> None:
    status, answer = await stage.chat(**fields)
    assert status == 400
    assert complaint in answer["error"]["message"]


def test_the_format_is_chosen_by_settings_and_vocabulary(harmony_model: Path, tiny_model: Path) -> None:
    with_markers, without = map(tokenizer_from_folder, (harmony_model, tiny_model))
    assert isinstance(choose_format(with_markers, max_model_len=8), HarmonyFormat)
    assert isinstance(choose_format(with_markers, max_model_len=8, chat_format="template"), TemplateFormat)
    assert isinstance(choose_format(with_markers, max_model_len=8, reasoning_parser="think"), TemplateFormat)
    assert isinstance(choose_format(without, max_model_len=8), TemplateFormat)
    with pytest.raises(FormatError):
        choose_format(without, max_model_len=8, chat_format="harmony")

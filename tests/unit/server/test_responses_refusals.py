"""What /v1/responses takes, and what it refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.double import MAX_MODEL_LEN, Stage, params_for_decode
from tests.unit.server.responding import (
    RESPONSES,
    WEATHER,
    refused,
    use_format,
    whole,
)


@pytest.fixture
async def stage(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model) as stage:
        use_format(stage)
        yield stage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{}] * 8193}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"parameters": "x"}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"text": {"verbosity": "shy"}}, "text.verbosity"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"input": "x" * MAX_MODEL_LEN}, "input"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
async def test_bad_bodies_are_refused_naming_the_field(stage: Stage, fields: dict[str, Any], param: str) -> None:
    error = await refused(stage, fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


async def test_stored_state_is_not_found(stage: Stage) -> None:
    error = await refused(stage, {"previous_response_id": "resp_1"}, status=404)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize(
    "harmless",
    [
        {"store": True, "truncation": "disabled", "background": False, "service_tier": "auto", "user": "me"},
        {"tools": [], "tool_choice": "auto", "max_tool_calls": 3, "previous_response_id": None, "conversation": None},
        {"stream_options": {"include_obfuscation": True, "include_usage": True}, "stream": True},
        {"top_k": 5, "min_p": 0.1, "seed": 7, "stop_token_ids": [1], "cache_salt": "s", "ignore_eos": True},
    ],
)
async def test_fields_of_the_api_and_ours_are_taken(stage: Stage, harmless: dict[str, Any]) -> None:
    async with stage.session.post(RESPONSES, json={"input": "hi"} | harmless) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def test_decode_leg_uses_the_given_ids_and_refuses_pictures(tiny_model: Path) -> None:
    async with Stage(tiny_model, role="decode", kv=True) as stage:
        use_format(stage)
        params = params_for_decode(prompt_token_ids=list(range(20)))
        answer = await whole(stage, kv_transfer_params=params)
        assert stage.submitted[0].prompt_token_ids == list(range(20))
        assert stage.tokenizer.calls == 0
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 16
        picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]
        status, error = await stage.post(RESPONSES, {"input": picture, "kv_transfer_params": params})
        assert (status, error["error"]["param"]) == (400, "input")
        assert len(stage.transport.released) == 1

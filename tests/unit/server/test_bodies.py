"""Request bodies: what is refused, with which message, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.wire.openai import APIError
from engine.api.bodies.base import parse
from engine.api.bodies.chat import parse_chat
from engine.api.bodies.completion import parse_completion
from engine.api.bodies.tokenize import TokenizeText

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def refused(body: dict[str, Any], *, chat: bool = True) -> APIError:
    with pytest.raises(APIError) as caught:
        parse_chat({"messages": MESSAGES} | body) if chat else parse_completion({"prompt": "hi"} | body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "fragment"),
    [
        ("temperature", -1, "greater than or equal to 0, got -1"),
        ("temperature", "1", "valid number"),
        ("temperature", True, "valid number"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("n", 0, "greater than or equal to 1, got 0"),
        ("n", 129, "less than or equal to 128"),
        ("top_k", -2, "greater than or equal to -1"),
        ("top_k", 1.5, "integer"),
        ("min_p", 2, "less than or equal to 1"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("max_tokens", "8", "integer"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("seed", 2**63, "less than"),
        ("seed", 1.5, "integer"),
        ("stop", 7, "a string or a list of strings"),
        ("stop", ["a", ""], "cannot be empty"),
        ("stop", [1], "a string or a list of strings"),
        ("stop_token_ids", [-1], "greater than or equal to 0"),
        ("presence_penalty", 3, "less than or equal to 2"),
        ("frequency_penalty", -3, "greater than or equal to -2"),
        ("repetition_penalty", 0, "greater than or equal to 0.01"),
        ("repetition_penalty", 101, "less than or equal to 100, got 101"),
        ("temperature", 10001, "less than or equal to 10000, got 10001"),
        ("temperature", 1e300, "less than or equal to 10000"),
        ("stop", ["a"] * 65, "at most 64 stop strings"),
        ("stop", "a" * 1001, "at most 1000 characters"),
        ("stop_token_ids", [1] * 1025, "at most 1024 ids"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "at most 1024 entries"),
        ("logit_bias", [1], "dictionary"),
        ("stream", "yes", "boolean"),
        ("ignore_eos", 1, "boolean"),
        ("cache_salt", "", "at least 1 character"),
        ("model", 7, "string"),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
def test_bad_values_are_refused_naming_the_field(field: str, value: object, fragment: str, chat: bool) -> None:
    error = refused({field: value}, chat=chat)
    assert fragment in error.message
    assert (error.param or "").split("[")[0] == field
    assert error.message.startswith(f"{error.param}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("chat_template", "{{ messages }}"),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_fields_without_a_function_here_are_refused_by_name(field: str, value: object) -> None:
    error = refused({field: value})
    assert error.param == field
    assert "not supported" in error.message


def test_completions_count_zero_logprobs_as_asked_for() -> None:
    assert parse_completion({"prompt": "a", "logprobs": 0}).num_logprobs == 0
    assert parse_completion({"prompt": "a", "logprobs": None}).num_logprobs is None
    assert parse_chat({"messages": MESSAGES, "logprobs": False}).num_logprobs is None


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1, "best_of": 1, "logprobs": None, "echo": False, "suffix": "", "response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "anything": [1, {}]},
        {"temperature": None, "stop": None, "stream": None, "kv_transfer_params": None},
    ],
)
def test_values_that_ask_for_nothing_are_taken(harmless: dict[str, Any]) -> None:
    assert parse_chat({"messages": MESSAGES} | harmless).stop is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 257}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "=f"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"kv_transfer_params": []}, "kv_transfer_params"),
    ],
)
def test_bad_chat_bodies(body: dict[str, Any], param: str) -> None:
    assert refused(body).param == param


def test_tools_are_taken_when_the_model_must_not_call_them() -> None:
    assert parse_chat({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}).choice == "none"


def test_text_parts_are_taken() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat({"messages": [{"role": "user", "content": parts}]}).messages[0].content


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_every_form_of_prompt(prompt: object, expected: object) -> None:
    assert parse_completion({"prompt": prompt}).prompt == expected


@pytest.mark.parametrize("prompt", [None, 5, {}, [], [[]], [1.5], [True], [None], [-1], [["a"]], [[1, "a"]]])
def test_bad_prompts(prompt: object) -> None:
    error = refused({"prompt": prompt}, chat=False)
    assert (error.param or "").startswith("prompt")


def test_missing_prompt() -> None:
    with pytest.raises(APIError) as caught:
        parse_completion({})
    assert caught.value.message == "prompt: required, but missing"


def test_defaults_of_sampling() -> None:
    sampling = parse_chat({"messages": MESSAGES}).sampling(max_tokens=9, vocab_size=10)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (9, 1.0, 0, 1.0)
    assert sampling.skip_special_tokens
    assert not sampling.stop


def test_sampling_carries_what_was_asked() -> None:
    body = parse_chat(
        {
            "messages": MESSAGES,
            "max_tokens": 3,
            "max_completion_tokens": 7,
            "min_tokens": 2,
            "temperature": 1e-5,
            "top_k": -1,
            "stop": "x",
            "stop_token_ids": [4],
            "logit_bias": {"3": 1000.0, "5": -7},
            "skip_special_tokens": False,
        }
    )
    assert body.requested_max_tokens == 7
    sampling = body.sampling(max_tokens=7, vocab_size=10)
    assert (sampling.min_tokens, sampling.temperature, sampling.top_k) == (2, 0.01, 0)
    assert sampling.stop == ("x",)
    assert sampling.stop_token_ids == {4}
    assert sampling.logit_bias == ((3, 100.0), (5, -7.0))
    assert not sampling.skip_special_tokens


def test_temperature_zero_stays_greedy() -> None:
    assert parse_chat({"messages": MESSAGES, "temperature": 0}).sampling(max_tokens=1, vocab_size=1).temperature == 0


def test_the_limits_themselves_are_taken() -> None:
    body = {
        "temperature": 1e4,
        "repetition_penalty": 100,
        "stop": ["a" * 1000] * 64,
        "stop_token_ids": [0] * 1024,
        "logit_bias": {str(i): 1 for i in range(1024)},
    }
    sampling = parse_chat({"messages": MESSAGES} | body).sampling(max_tokens=1, vocab_size=1024)
    assert (sampling.temperature, sampling.repetition_penalty, len(sampling.stop)) == (1e4, 100, 64)
    assert len(sampling.logit_bias) == 1024


def test_stop_token_ids_outside_the_vocabulary() -> None:
    body = parse_chat({"messages": MESSAGES, "stop_token_ids": [9, 10]})
    with pytest.raises(APIError, match="stop_token_ids: token id 10 is out of vocabulary, ids end at 9"):
        body.sampling(max_tokens=1, vocab_size=10)


def test_a_token_written_twice_has_one_bias() -> None:
    body = parse_chat({"messages": MESSAGES, "logit_bias": {"7": 1, "07": 2}})
    assert body.sampling(max_tokens=1, vocab_size=10).logit_bias == ((7, 2.0),)


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"messages": MESSAGES * 8193}, "messages", "at most 8192 messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 8193}]},
            "messages[0].content",
            "at most 8192 content parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 8192}] * 9},
            "messages",
            "at most 65536 content parts",
        ),
        ({"documents": [{}] * 8193}, "documents", "at most 8192 entries"),
        ({"tools": [{}] * 8193, "tool_choice": "none"}, "tools", "at most 8192 entries"),
    ],
)
def test_collections_too_long(body: dict[str, Any], param: str, fragment: str) -> None:
    error = refused(body)
    assert error.param == param
    assert fragment in error.message


def test_messages_reach_the_template_as_sent() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    sent = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}],
        "name": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        "extra": deep,
    }
    assert parse_chat({"messages": [sent]}).messages[0].for_template() == sent


@pytest.mark.parametrize("key", ["10", "-1", "a", "1.5", "²", "", "9" * 5000, "0" * 5000])
def test_logit_bias_of_no_token(key: str) -> None:
    body = parse_chat({"messages": MESSAGES, "logit_bias": {key: 1}})
    with pytest.raises(APIError, match="logit_bias"):
        body.sampling(max_tokens=1, vocab_size=10)


def test_min_tokens_beyond_max_tokens() -> None:
    body = parse_chat({"messages": MESSAGES, "min_tokens": 5, "max_tokens": 4})
    with pytest.raises(APIError, match="min_tokens: must not exceed max_tokens=4"):
        body.sampling(max_tokens=4, vocab_size=10)


def test_messages_never_repeat_what_the_client_wrote() -> None:
    with pytest.raises(APIError) as caught:
        parse(TokenizeText, {"prompt": ["my secret"]})
    assert "secret" not in caught.value.message

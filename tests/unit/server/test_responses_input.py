"""Input items as chat messages."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.wire.openai import APIError
from engine.api.bodies.responses import parse_responses
from engine.api.responses_input import prompt_of

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def messages(given: object, **fields: Any) -> list[Any]:
    return list(prompt_of(parse_responses({"input": given} | fields)).messages)


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def thought(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part], "encrypted_content": None}


def test_text_is_the_users_and_instructions_come_first() -> None:
    system = {"role": "system", "content": "be brief"}
    assert messages("hi", instructions="be brief") == [system, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        ([{"type": "input_text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "hi"}], "hi"),
        (
            [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            [
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b"},
            ],
        ),
        ([], ""),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("kind", [{}, {"type": "message"}, {"type": None}])
def test_every_form_of_content(content: object, expected: object, role: str, kind: dict[str, Any]) -> None:
    assert messages([{"role": role, "content": content} | kind]) == [{"role": role, "content": expected}]


def test_one_turn_of_the_model_is_one_message() -> None:
    call = CALL | {"call_id": "c2"}
    turn = messages([thought("hm"), thought("ah"), said("one moment"), CALL, call, OUTPUT, said("sunny!")])
    assert turn == [
        {
            "role": "assistant",
            "content": "one moment",
            "reasoning_content": "hm\nah",
            "tool_calls": [CALLED, CALLED | {"id": "c2"}],
        },
        TOLD,
        {"role": "assistant", "content": "sunny!"},
    ]


def test_what_is_said_after_a_call_is_a_message_of_its_own() -> None:
    expected = [{"role": "assistant", "content": "", "tool_calls": [CALLED]}, {"role": "assistant", "content": "so"}]
    assert messages([CALL, said("so")]) == expected
    assert messages([said("a"), said("b")]) == [{"role": "assistant", "content": text} for text in "ab"]
    assert messages([said("a"), thought("hm"), said("b")])[1] == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "hm",
    }


def test_thoughts_that_came_to_nothing_are_no_message() -> None:
    assert messages([thought("hm"), {"role": "user", "content": "hi"}]) == [{"role": "user", "content": "hi"}]


def test_summaries_stand_in_for_thoughts() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert messages([item, said("a")])[0]["reasoning_content"] == "in short"


def test_refusals_and_easy_messages_of_the_assistant_are_text() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert messages([refusal])[0]["content"] == "no"
    assert messages([{"role": "assistant", "content": "yes"}])[0]["content"] == "yes"


def test_outputs_of_functions_may_come_in_parts() -> None:
    output = OUTPUT | {"output": [{"type": "input_text", "text": "sunny"}]}
    assert messages([CALL, output])[1] == TOLD


def test_functions_and_effort_reach_the_template_as_a_chats_do() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    prompt = prompt_of(
        parse_responses(
            {"input": "hi", "tools": [tool], "reasoning": {"effort": "low"}, "chat_template_kwargs": {"a": 1}}
        )
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert prompt.tools == [{"type": "function", "function": function}]
    assert prompt.variables == {"a": 1, "reasoning_effort": "low"}
    assert prompt.add_generation_prompt


def test_parts_are_counted_over_all_items() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 8192}
    with pytest.raises(APIError, match=r"^input: at most 65536 content parts"):
        messages([item] * 9)

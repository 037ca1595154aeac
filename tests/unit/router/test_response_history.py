"""Items of the responses endpoint as chat messages."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.response_history import history_of, messages_of
from router.conversation import Scope, identify

SCOPE = Scope("t", "m", None)
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c",
    "name": "f",
    "arguments": '{"a": 1}',
    "status": "completed",
}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}


def test_a_string_is_what_the_user_says() -> None:
    body = {"input": "Hi", "instructions": "Be brief"}
    assert history_of(body) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi", "tool_calls": []},
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": ["a"]},
        {"input": "Hi", "previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ],
)
def test_a_history_that_cannot_be_told(body: dict[str, Any]) -> None:
    assert history_of(body) is None


@pytest.mark.parametrize(
    "output",
    [[said("Yes")], [REASONING, said("Yes")], [said("Yes"), CALL], [CALL, {**CALL, "name": "g"}], [REASONING, CALL]],
)
def test_the_next_request_finds_what_the_answer_was_filed_under(output: list[dict[str, Any]]) -> None:
    """However the client writes the answer back: with the ids and reasoning it got, or without."""
    first = [{"role": "user", "content": "Hi"}]
    key = identify(SCOPE, None, history_of({"input": first})).file_under(messages_of(output)[-1])
    more = {"type": "function_call_output", "call_id": "c", "output": "42"}
    bare = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in output if item != REASONING]
    for items in (output, bare):
        assert identify(SCOPE, None, history_of({"input": [*first, *items, more]})).find == key


def test_it_is_the_same_conversation_as_in_a_chat() -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "?"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        said("Yes"),
        {"role": "user", "content": "?"},
    ]
    assert identify(SCOPE, None, chat).find == identify(SCOPE, None, history_of({"input": items})).find


def test_pictures_stay_what_they_are() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    [message] = messages_of([{"role": "user", "content": [{"type": "input_text", "text": "See"}, picture]}])
    assert message["content"] == [{"type": "text", "text": "See"}, picture]

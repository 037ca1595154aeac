"""Finding a conversation again, and never another one."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.wire.openai import APIError
from router.conversation import Record, Scope, identify, name_of, pack_ids, unpack_ids

SCOPE = Scope("default", "m", None)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!", "tool_calls": []}
MORE = {"role": "user", "content": "Go on"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_next_request_finds_the_turn_before() -> None:
    filed = identify(SCOPE, None, [SYSTEM, USER]).file_under(ANSWER)
    assert filed is not None
    assert identify(SCOPE, None, [SYSTEM, USER, ANSWER, MORE]).find == filed
    again = identify(SCOPE, None, [SYSTEM, USER, ANSWER, MORE]).file_under(ANSWER)
    assert again not in (None, filed)


@pytest.mark.parametrize(
    "echoed",
    [
        {"role": "assistant", "content": "Hello!"},
        {"role": "assistant", "content": " Hello!\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "assistant", "content": "Hello!", "refusal": None, "tool_calls": None, "audio": None},
        {"content": "Hello!", "role": "assistant", "reasoning_content": "They greet me."},
    ],
)
def test_answer_is_recognised_however_a_client_writes_it_back(echoed: dict[str, Any]) -> None:
    filed = identify(SCOPE, None, [USER]).file_under(ANSWER)
    assert identify(SCOPE, None, [USER, echoed, MORE]).find == filed


def test_tool_calls_are_recognised_without_their_ids() -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL["function"]}]}
    filed = identify(SCOPE, None, [USER]).file_under(said)
    echoed = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    assert identify(SCOPE, None, [USER, echoed, result]).find == filed
    other = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 2}'}}]}
    assert identify(SCOPE, None, [USER, other, result]).find != filed


def test_anything_different_is_another_conversation() -> None:
    histories = [
        (SCOPE, [USER, ANSWER, MORE]),
        (SCOPE, [SYSTEM, USER, ANSWER, MORE]),
        (SCOPE, [{**USER, "content": "Hi?"}, ANSWER, MORE]),
        (SCOPE, [USER, {**ANSWER, "content": "Hello"}, MORE]),
        (SCOPE, [USER, ANSWER, MORE, ANSWER]),
        (SCOPE, [{**USER, "name": "Eve"}, ANSWER, MORE]),
        (SCOPE, [{**USER, "role": "developer"}, ANSWER, MORE]),
        (Scope("other", "m", None), [USER, ANSWER, MORE]),
        (Scope("default", "m2", None), [USER, ANSWER, MORE]),
        (Scope("default", "m", "salt"), [USER, ANSWER, MORE]),
    ]
    keys = [identify(scope, None, messages).find for scope, messages in histories]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_named_conversations_differ_by_name_and_scope_only() -> None:
    scopes = [SCOPE, Scope("other", "m", None), Scope("default", "m2", None), Scope("default", "m", "s")]
    keys = [identify(scope, name, None).find for scope, name in itertools.product(scopes, ["a", "b"])]
    assert len(set(keys)) == 8
    named = identify(SCOPE, "a", [USER])
    assert named.find == keys[0]
    assert named.file_under(ANSWER) == keys[0]
    assert "a" not in (named.find or "").removeprefix("backhaul:conversation:1:").split(":")


def test_first_turn_has_nothing_to_find() -> None:
    assert identify(SCOPE, None, [SYSTEM, USER]).find is None


@pytest.mark.parametrize("messages", [None, [], "text", 5, [USER, "text"], [None]])
def test_what_is_no_history_has_no_conversation(messages: object) -> None:
    conversation = identify(SCOPE, None, messages)
    assert conversation.find is None
    assert conversation.file_under(ANSWER) is None


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": 5, "content": {"a": 1}},
        {"role": "user", "content": [5, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "tool_calls": ["x", {"function": "f"}, {}]},
        {"role": "assistant", "tool_calls": 5},
    ],
)
def test_odd_messages_are_left_for_the_engine_to_refuse(message: dict[str, Any]) -> None:
    assert identify(SCOPE, None, [message]).file_under(ANSWER) is not None


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({}, {}, None),
        ({"conversation_id": "b"}, {"X-Conversation-Id": "h"}, "b"),
        ({}, {"X-Conversation-Id": "h", "X-Session-Id": "s"}, "h"),
        ({}, {"X-Session-Id": "s"}, "s"),
        ({"conversation_id": ""}, {}, None),
        ({"conversation_id": None}, {"X-Session-Id": "s"}, "s"),
    ],
)
def test_name(body: dict[str, Any], headers: dict[str, str], name: str | None) -> None:
    assert name_of(body, headers) == name


@pytest.mark.parametrize("header", ["X-Conversation-Id", "X-Session-Id"])
def test_name_of_any_bytes_is_a_name(header: str) -> None:
    texts = [raw.decode(errors="surrogateescape") for raw in (b"\xff", b"\xfe", b"a\xc3", "ü".encode())]
    names = [name_of({}, {header: text}) for text in texts]
    assert len({identify(SCOPE, name, None).find for name in names}) == len(texts)


@pytest.mark.parametrize("part", ["role", "name", "content"])
def test_message_nested_too_deeply_is_refused(part: str) -> None:
    deep = orjson.loads(b"[" * 300 + b"]" * 300)
    with pytest.raises(APIError) as refused:
        identify(SCOPE, None, [{**USER, part: deep}])
    assert refused.value.status == 400
    assert "too deeply" in refused.value.message


@pytest.mark.parametrize("name", [5, ["a"], {"a": 1}, "x" * 513, True])
def test_bad_name_is_refused(name: object) -> None:
    with pytest.raises(APIError) as refused:
        name_of({"conversation_id": name}, {})
    assert (refused.value.status, refused.value.param) == (400, "conversation_id")


RECORD = Record(
    turn=3,
    prefill="http://p",
    decode="http://d",
    deadline=12.5,
    prompt_ids=pack_ids([1, 2, 70000]),
    output_ids=pack_ids([5]),
    params={"remote_block_ids": [[1]], "x": None},
)


def test_record_survives_packing() -> None:
    assert Record.unpack(RECORD.pack()) == RECORD
    assert unpack_ids(RECORD.prompt_ids) == [1, 2, 70000]
    assert Record.unpack(Record(1, None, "d", 0.0).pack()) == Record(1, None, "d", 0.0)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


@given(st.binary(max_size=300))
def test_garbage_is_no_record(data: bytes) -> None:
    with pytest.raises(ValueError):
        Record.unpack(data)


@pytest.mark.parametrize("length", range(len(RECORD.pack()) - len(RECORD.output_ids)))
def test_record_cut_short_is_no_record(length: int) -> None:
    with pytest.raises(ValueError):
        Record.unpack(RECORD.pack()[:length])


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        *[("deadline", value) for value in ("z", None, "1", True)],
        *[("turn", value) for value in (None, "x", 2**64 - 1, 2**31, 0, -1, 1.5, True)],
        *[("params", value) for value in ([], [1], "x", 5)],
        *[("prefill", value) for value in (5, [], {})],
        *[("decode", value) for value in (None, 5)],
        ("more", 1),
    ],
)
def test_record_with_a_wrong_fact_is_no_record(fact: str, value: object) -> None:
    facts = {name: getattr(RECORD, name) for name in ("turn", "prefill", "decode", "deadline", "params")}
    assert Record.unpack(_packed(facts)) == replace(RECORD, prompt_ids=b"", output_ids=b"")
    with pytest.raises(ValueError):
        Record.unpack(_packed({**facts, fact: value}))


@pytest.mark.parametrize("facts", [[], None, "x", {}])
def test_record_without_facts_is_no_record(facts: object) -> None:
    with pytest.raises(ValueError):
        Record.unpack(_packed(facts))


def _packed(facts: object) -> bytes:
    text = orjson.dumps(facts)
    return struct.pack("<BII", 1, len(text), 0) + text


def test_record_of_another_version_is_no_record() -> None:
    with pytest.raises(ValueError):
        Record.unpack(b"\x02" + RECORD.pack()[1:])

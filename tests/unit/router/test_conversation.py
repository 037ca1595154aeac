"""Finding a conversation again, and never another one."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest

from connectors.wire.openai import APIError
from router.conversation import KEY_PREFIX, Scope, identify, media_digests, name_of

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


@pytest.mark.parametrize("said", ["<think>They greet me.</think>\n\nHello!", "They greet me.</think>Hello!", "Hello!"])
@pytest.mark.parametrize(
    "echoed",
    [
        "<think>They greet me.</think>\n\nHello!",
        "They greet me.\n</think>\n\nHello!",
        "<think>\n\n</think>\n\nHello!",
        "Hello!",
        [{"type": "text", "text": "<think>They greet me.</think>Hello!"}],
        [{"type": "thinking", "thinking": "They greet me."}, {"type": "text", "text": "Hello!"}],
    ],
)
def test_answer_is_recognised_with_and_without_its_thoughts(said: str, echoed: object) -> None:
    filed = identify(SCOPE, None, [USER]).file_under({**ANSWER, "content": said})
    assert identify(SCOPE, None, [USER, {"role": "assistant", "content": echoed}, MORE]).find == filed


@pytest.mark.parametrize(
    "text", ["<think>Hello!", "The tag <think>is</think> Hello!", "</thinking>Hello!", "<think>no</think>", ""]
)
def test_what_are_no_thoughts_is_not_left_out(text: str) -> None:
    plain = identify(SCOPE, None, [USER]).file_under({**ANSWER, "content": "Hello!"})
    assert identify(SCOPE, None, [USER, {"role": "assistant", "content": text}, MORE]).find != plain


def test_only_an_assistant_thinks() -> None:
    thoughtful = {"role": "user", "content": "<think>x</think>Hi"}
    assert identify(SCOPE, None, [thoughtful]).file_under(ANSWER) != identify(SCOPE, None, [USER]).file_under(ANSWER)


@pytest.mark.parametrize("arguments", ['{"b": [1, 2], "a": 1}', '{"a":1,"b":[1,2]}', ' {"a": 1,\n "b": [1, 2]}'])
def test_tool_calls_are_recognised_however_their_arguments_are_spaced(arguments: str) -> None:
    def calling(text: object) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": text}}]}

    filed = identify(SCOPE, None, [USER]).file_under(calling('{"a": 1, "b": [1, 2]}'))
    assert identify(SCOPE, None, [USER, calling(arguments)]).find == filed
    for other in ('{"a": 1, "b": [2, 1]}', '{"a": 1', "", None, "[" * 2000, "[" * 300 + "]" * 300):
        assert identify(SCOPE, None, [USER, calling(other)]).find not in (None, filed)


def test_answer_nobody_could_send_back_is_filed_nowhere() -> None:
    assert identify(SCOPE, None, [USER]).file_under({**ANSWER, "content": "half an emoji: \ud83d"}) is None
    odd = Scope("\udcff", "m", "\ud83d")
    assert identify(odd, None, [USER]).file_under(ANSWER) != identify(SCOPE, None, [USER]).file_under(ANSWER)


def test_tool_calls_are_recognised_without_their_ids() -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL["function"]}]}
    filed = identify(SCOPE, None, [USER]).file_under(said)
    echoed = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    conversation = identify(SCOPE, None, [USER, echoed, result])
    assert conversation.find == filed
    renamed = identify(SCOPE, None, [USER, echoed, {**result, "tool_call_id": "call_2"}])
    assert renamed.file_under(ANSWER) == conversation.file_under(ANSWER)
    elsewhere = identify(SCOPE, None, [USER, echoed, {**result, "content": "5"}])
    assert elsewhere.file_under(ANSWER) != conversation.file_under(ANSWER)
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
    assert (named.find or "").startswith(KEY_PREFIX)
    assert "a" not in (named.find or "").removeprefix(KEY_PREFIX).split(":")


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


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_media_are_told_apart_and_kept_in_order() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    text = {"type": "text", "text": "What is it?"}
    one, two = media_digests([USER, {"role": "user", "content": [text, PICTURE, sound]}])
    assert one != two
    assert media_digests([{"role": "user", "content": [sound, text]}, {"role": "user", "content": [PICTURE]}]) == (
        two,
        one,
    )
    turned = {"image_url": {"url": "data:image/png;base64,AAAA"}, "type": "image_url"}
    assert media_digests([{"role": "user", "content": [turned]}]) == (one,)
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}
    assert media_digests([{"role": "user", "content": [other]}]) != (one,)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "text",
        [],
        ["x", None, 5],
        [USER, ANSWER, MORE],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
        [
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "a"}, {"type": "refusal", "refusal": "b"}],
            }
        ],
    ],
)
def test_text_has_no_media(messages: object) -> None:
    assert media_digests(messages) == ()


@pytest.mark.parametrize("part", [{}, {"type": 5}, {"type": "hologram"}, {"image_url": "x"}, 5, None, []])
def test_what_is_not_known_to_be_text_counts_as_media(part: object) -> None:
    assert len(media_digests([{"role": "user", "content": [part]}])) == 1

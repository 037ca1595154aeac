"""POST /tokenize: the ids that the generating endpoints would use, and known ids kept where the text is the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.api import tokens as tokens_api
from engine.api.context import LONG_TEXT
from tests.tiny import IM_END, VOCAB_SIZE
from tests.unit.server.double import Stage, byte_ids

SHOWS_ALL = """\
{% for message in messages %}[{{ message.role }}|{{ message.content }}|{{ message.tool_calls | tojson \
if message.tool_calls is defined else '' }}]{% endfor %}
{{ tools | tojson if tools }};{{ documents | tojson if documents }};{{ reasoning_effort }};{{ enable_thinking }}\
{% if add_generation_prompt %}>{% endif %}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi there"}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [TOOL]},
    "documents": {"documents": [{"title": "t", "text": "x"}]},
    "reasoning_effort": {"reasoning_effort": "low"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"}},
    "both efforts": {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"continue_final_message": True},
    "add_special_tokens": {"add_special_tokens": True},
    "messages": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL]}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in ("a", "b")]}]},
}
NOT_RENDERED: list[dict[str, Any]] = [
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"parallel_tool_calls": True, "cache_salt": "s", "unknown": {"a": 1}, "stop": ["a"], "temperature": 0.5},
]


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    template = tmp_path / "template.jinja"
    template.write_text(SHOWS_ALL)
    async with Stage(tiny_model, max_model_len=2000, max_body_bytes=2_000_000) as stage:
        stage.tokenizer.use_chat_template(template)
        yield stage


async def tokens(stage: Stage, body: dict[str, Any], path: str = "/tokenize") -> list[int]:
    status, answer = await stage.post(path, body)
    assert status == 200, answer
    assert answer["count"] == len(answer["tokens"])
    assert answer["num_spliced"] == 0
    return list(answer["tokens"])


@pytest.mark.parametrize("case", BODIES)
async def test_conversation_has_the_ids_that_chat_uses(stage: Stage, case: str) -> None:
    body = {"messages": [USER]} | BODIES[case]
    for extra in ({}, *NOT_RENDERED):
        found = await tokens(stage, body | extra)
        needs = {"tool_choice": "none"} if "tools" in body else {}
        status, answer = await stage.post("/v1/chat/completions", body | extra | needs)
        assert status == 200, answer
        assert stage.submitted[-1].prompt_token_ids == found
    if case not in ("plain", "add_special_tokens"):
        assert found != await tokens(stage, {"messages": [USER]}), "the template shows it"


async def test_special_tokens_are_added_to_either_as_asked(stage: Stage) -> None:
    from tokenizers.processors import TemplateProcessing

    stage.tokenizer._backend.post_processor = TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", IM_END)]
    )
    for asked, default_chat, default_text in ((None, False, True), (True, True, True), (False, False, False)):
        chat = {"messages": [USER], "add_special_tokens": asked}
        text = {"prompt": "hi", "add_special_tokens": asked}
        for path, body, expected in (
            ("/v1/chat/completions", chat, default_chat),
            ("/v1/completions", text, default_text),
        ):
            found = await tokens(stage, body)
            assert (found[0] == IM_END) is expected
            assert (await stage.post(path, body))[0] == 200
            assert stage.submitted[-1].prompt_token_ids == found


@pytest.mark.parametrize(
    "change",
    [
        {"chat_template": "{{ messages }}"},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"chat_template_kwargs": {"tools": []}},
        {"tools": [5]},
    ],
)
async def test_what_chat_refuses_to_render_is_refused_alike(stage: Stage, change: dict[str, Any]) -> None:
    body = {"messages": [USER], "tool_choice": "none"} | change
    chat, tokenize = [await stage.post(path, body) for path in ("/v1/chat/completions", "/tokenize")]
    assert chat[0] == tokenize[0] == 400
    assert chat[1]["error"] == tokenize[1]["error"]


ODD = byte_ids(" hello the")
"""Letter by letter, as the tokenizer never cuts it."""


async def test_known_ids_stay_where_the_text_is_the_same(stage: Stage) -> None:
    text = " hello the<|im_end|> world"
    canonical = await tokens(stage, {"prompt": text})
    known = [*ODD, IM_END]
    assert canonical[: len(known)] != known
    status, answer = await stage.post(
        "/tokenize", {"prompt": text, "known_token_ids": known, "return_token_strs": True}
    )
    assert status == 200
    assert answer["tokens"] == [*known, *canonical[-1:]]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["num_spliced"] == len(known)
    assert "".join(answer["token_strs"]) == text
    prompt = {"tokens": answer["tokens"]}
    assert (await stage.post("/detokenize", prompt))[1] == {"prompt": text}
    again = {"prompt": text, "known_token_ids": answer["tokens"]}
    assert (await stage.post("/tokenize", again))[1]["tokens"] == answer["tokens"]


async def test_known_ids_of_a_conversation_reach_its_next_prompt(tiny_model: Path) -> None:
    async with Stage(tiny_model) as stage:
        prompt = await tokens(stage, {"messages": [USER]})
        known = [*prompt, *ODD, IM_END]
        answer = {"role": "assistant", "content": " hello the"}
        body = {"messages": [USER, answer, USER]}
        canonical = await tokens(stage, body)
        _, found = await stage.post("/tokenize", body | {"known_token_ids": known})
        assert found["tokens"][: len(known)] == known
        assert found["num_spliced"] == len(known) - len(prompt)
        decode = stage.tokenizer.decode
        assert decode(found["tokens"], skip_special_tokens=False) == decode(canonical, skip_special_tokens=False)
        edited = {"messages": [USER, answer | {"content": " hello and"}, USER]}
        expected = await tokens(stage, edited)
        _, found = await stage.post("/tokenize", edited | {"known_token_ids": known})
        assert (found["tokens"], found["num_spliced"]) == (expected, 0)


@pytest.mark.parametrize("form", [{"prompt": "hi"}, {"messages": [USER]}])
@pytest.mark.parametrize("ids", [[VOCAB_SIZE], [0, VOCAB_SIZE], [-1], [1.0], [True], ["1"], "abc", 5, [[1]]])
async def test_known_ids_that_are_none_are_refused_by_name(stage: Stage, form: dict[str, Any], ids: object) -> None:
    status, answer = await stage.post("/tokenize", form | {"known_token_ids": ids})
    assert status == 400
    assert answer["error"]["param"].startswith("known_token_ids")
    assert stage.tokenizer.calls == 0


async def test_more_known_ids_than_the_context_holds_are_refused_unread(stage: Stage) -> None:
    status, answer = await stage.post("/tokenize", {"prompt": "hi", "known_token_ids": ["?"] * 2001})
    assert (status, answer["error"]["param"]) == (400, "known_token_ids")


@pytest.mark.parametrize("ids", [None, []])
async def test_no_known_ids_change_nothing(stage: Stage, ids: object) -> None:
    assert await tokens(stage, {"prompt": "hi", "known_token_ids": ids}) == byte_ids("hi")


async def test_long_prompts_are_spliced_alike_in_a_thread(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large: list[bool] = []
    offload = tokens_api.offload

    async def recorded(large_: bool, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function == stage.tokenizer.splice:
            large.append(large_)
        return await offload(large_, function, *args, **kwargs)

    monkeypatch.setattr(tokens_api, "offload", recorded)
    async with Stage(tiny_model, max_model_len=2 * LONG_TEXT) as stage:
        for times in (1, LONG_TEXT // len(ODD) + 1):
            text = " hello the" * times
            _, answer = await stage.post("/tokenize", {"prompt": text, "known_token_ids": ODD * times})
            assert answer["tokens"] == ODD * times
    assert large == [False, True]

"""Sampling fields from the body to the engine's request, and what of them is refused."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.api.requests import bad_word_ids
from engine.grammar import GrammarSpec
from engine.request import Request
from engine.tokenizer import Tokenizer
from tests.tiny import VOCAB_SIZE
from tests.unit.server.double import Stage


@pytest.fixture
async def priorities(tiny_model: Path) -> AsyncIterator[Stage]:
    """A stage whose engine goes by priority."""
    async with Stage(tiny_model) as stage:
        stage.worker.serving = replace(stage.serving, priority_scheduling=True)
        yield stage


async def request_of(stage: Stage, **fields: Any) -> Request:
    status, answer = await stage.post("/v1/completions", {"prompt": "hi"} | fields)
    assert status == 200, answer
    return stage.submitted[-1]


async def refused(stage: Stage, param: str, headers: dict[str, str] | None = None, **fields: Any) -> str:
    body = {"prompt": "hi"} | fields
    status, answer = await stage.post("/v1/completions", body, headers=headers)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert not stage.submitted
    message: str = answer["error"]["message"]
    assert message.startswith(param.split("[")[0])
    return message


async def test_nothing_is_asked_for_by_default(stage: Stage) -> None:
    sampling = (await request_of(stage)).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.grammar) == (None, None, None)
    assert (sampling.bad_words, sampling.allowed_tokens) == ((), None)


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_prompt_logprobs_reach_the_engine(stage: Stage, count: int) -> None:
    assert (await request_of(stage, prompt_logprobs=count)).sampling.prompt_logprobs == count


@pytest.mark.parametrize("count", [-1, 21, 10**9, True, "1", 1.5])
async def test_bad_prompt_logprobs(stage: Stage, count: object) -> None:
    await refused(stage, "prompt_logprobs", prompt_logprobs=count)


async def test_max_logprobs_is_the_engines(stage: Stage) -> None:
    stage.worker.serving = replace(stage.serving, max_logprobs=3)
    assert "at most 3" in await refused(stage, "prompt_logprobs", prompt_logprobs=4)
    await request_of(stage, prompt_logprobs=3)


async def test_bad_words_are_spelt_at_the_beginning_and_after_a_space(stage: Stage) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(stage.tokenizer.encode(text, add_special_tokens=False))

    words = (await request_of(stage, bad_words=["the", " and", "xq", "the"])).sampling.bad_words
    assert len(ids(" and")) == 1, "else the test does not show what it is for"
    spaced = [ids(f" {word}") for word in ("the", "and", "xq") if len(ids(f" {word}")) == len(ids(word))]
    assert set(words) == {ids("the"), ids("and"), ids("xq"), *spaced}
    assert len(words) == 3 + len(spaced)


@pytest.mark.parametrize("words", ["a", [""], ["  "], [5], ["a" * 201], ["a"] * 257, {"a": 1}])
async def test_bad_bad_words(stage: Stage, words: object) -> None:
    status, answer = await stage.post("/v1/completions", {"prompt": "hi", "bad_words": words})
    assert status == 400
    assert (answer["error"]["param"] or "").split("[")[0] == "bad_words"
    assert not stage.submitted


async def test_allowed_token_ids_reach_the_engine(stage: Stage) -> None:
    packed = (await request_of(stage, allowed_token_ids=[0, 9, VOCAB_SIZE - 1, 9])).sampling.allowed_tokens
    assert packed is not None
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [0, 9, VOCAB_SIZE - 1]


@pytest.mark.parametrize("ids", [[], [-1], [VOCAB_SIZE], [2**70], ["1"], [True], 5])
async def test_bad_allowed_token_ids(stage: Stage, ids: object) -> None:
    status, answer = await stage.post("/v1/completions", {"prompt": "hi", "allowed_token_ids": ids})
    assert status == 400
    assert (answer["error"]["param"] or "").split("[")[0] == "allowed_token_ids"


async def test_priority_is_the_bodys_or_the_headers(priorities: Stage) -> None:
    assert (await request_of(priorities)).priority == 0
    assert (await request_of(priorities, priority=-4)).priority == -4
    body = {"prompt": "hi", "priority": -4}
    assert (await priorities.post("/v1/completions", body, headers={"X-Vllm-Priority": "12"}))[0] == 200
    assert priorities.submitted[-1].priority == 12


@pytest.mark.parametrize("header", ["x", "1.5", "", "--1", "²", "9" * 21, str(2**63), str(-(2**63) - 1), "1" * 5000])
async def test_bad_priority_headers(priorities: Stage, header: str) -> None:
    headers = {"X-Vllm-Priority": header}
    status, answer = await priorities.post("/v1/completions", {"prompt": "hi"}, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize("priority", ["1", 1.5, True, 2**63])
async def test_bad_priorities(priorities: Stage, priority: object) -> None:
    await refused(priorities, "priority", priority=priority)


async def test_priorities_need_an_engine_that_goes_by_them(stage: Stage) -> None:
    assert "needs priority scheduling" in await refused(stage, "priority", priority=1)
    await refused(stage, "priority", headers={"X-Vllm-Priority": "-1"})
    await request_of(stage, priority=0)
    assert (await stage.post("/v1/completions", {"prompt": "hi"}, headers={"X-Vllm-Priority": "0"}))[0] == 200


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json": '{"type": "string"}', "regex": None}}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "lark"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, "json_object"),
        ({"guided_json": SCHEMA}, "json_schema"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a"]}, "choice"),
        ({"guided_grammar": 'start: "a"'}, "lark"),
    ],
)
async def test_constraints_reach_the_engine_compiled(stage: Stage, fields: dict[str, Any], kind: str) -> None:
    request = await request_of(stage, **fields)
    assert isinstance(request.sampling.grammar, GrammarSpec)
    assert request.sampling.grammar.kind == kind
    assert request.matcher is not None
    assert any(request.matcher.bitmask())


async def test_each_answer_has_a_matcher_of_its_own(stage: Stage) -> None:
    await request_of(stage, n=3, guided_regex="a+")
    matchers = {id(request.matcher) for request in stage.submitted[-3:]}
    assert len(matchers) == 3


SO = "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param", "fragment"),
    [
        ({SO: {}}, SO, "one of json, regex"),
        ({SO: {"json_object": False}}, SO, "one of json, regex"),
        ({SO: "a"}, SO, ""),
        ({SO: {"json": 5}}, f"{SO}.json", ""),
        ({SO: {"json": "{"}}, f"{SO}.json", ""),
        ({SO: {"json": {"type": "nope"}}}, f"{SO}.json", "nope"),
        ({SO: {"regex": ""}}, f"{SO}.regex", "1 to 131072 characters"),
        ({SO: {"regex": "("}}, f"{SO}.regex", "regex"),
        ({SO: {"choice": []}}, f"{SO}.choice", "1 to 1024 strings"),
        ({SO: {"choice": [""]}}, f"{SO}.choice", "cannot be empty"),
        ({SO: {"choice": ["a"] * 1025}}, f"{SO}.choice", "got 1025"),
        ({SO: {"choice": [1]}}, f"{SO}.choice[0]", "string"),
        ({SO: {"grammar": "start: x"}}, f"{SO}.grammar", "unknown name"),
        ({SO: {"json_object": 1}}, f"{SO}.json_object", "boolean"),
        ({SO: {"structural_tag": "{}"}}, SO, "structural_tag is not supported"),
        ({SO: {"regex": "a", "whitespace_pattern": " "}}, SO, "whitespace_pattern is not supported"),
        ({SO: {"regex": "a", "choice": ["a"]}}, SO, "only one constraint"),
        ({SO: {"regex": "a"}, "guided_choice": ["a"]}, SO, "only one constraint"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "only one constraint"),
        ({"guided_json": []}, "guided_json", ""),
        ({"guided_regex": 7}, "guided_regex", "string"),
        ({"guided_choice": "a"}, "guided_choice", "list"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar", ""),
    ],
)
async def test_bad_constraints(stage: Stage, fields: dict[str, Any], param: str, fragment: str) -> None:
    status, answer = await stage.post("/v1/completions", {"prompt": "hi"} | fields, timeout=30)
    assert status == 400, answer
    assert re.sub(r"\.(str|dict.*)$", "", answer["error"]["param"]) == param
    assert fragment in answer["error"]["message"]
    assert not stage.submitted


async def test_refused_constraint_of_a_handoff_releases_its_blocks(decode: Stage) -> None:
    from tests.unit.server.double import params_for_decode

    body = {"prompt": "hi", "kv_transfer_params": params_for_decode(), "guided_regex": "("}
    assert (await decode.post("/v1/completions", body))[0] == 400
    assert len(decode.transport.released) == 1


class NoTokens:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []


def test_word_that_no_token_spells_cannot_come_up() -> None:
    assert bad_word_ids(cast(Tokenizer, NoTokens()), ["\u200b"]) == ()

"""/v1/completions: prompts of every kind, echo, logprobs, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from engine.grammar import GrammarSpec
from engine.logprobs import TokenLogprobs
from engine.messages import Output
from engine.request import Request
from tests.tiny import IM_END
from tests.unit.server.double import Stage, byte_ids, params_for_decode

COMPLETIONS = "/v1/completions"


def logprob(token: int) -> TokenLogprobs:
    """A token that was the second likeliest."""
    return TokenLogprobs(token, -1.0, 2, ((byte_ids("x")[0], -0.5), (token, -1.0)))


def with_logprobs(request: Request) -> Iterable[Output]:
    """Says "ab", with the logprobs that were asked for."""
    sampling = request.sampling
    prompt = None
    if sampling.prompt_logprobs is not None:
        prompt = [None, *map(logprob, request.prompt_token_ids[1:])]
    for number, token in enumerate(byte_ids("ab")):
        yield Output(
            request.request_id,
            [token],
            "length" if number else None,
            logprobs=[logprob(token)] if sampling.logprobs is not None else (),
            prompt_logprobs=None if number else prompt,
        )


def text_of(events: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def joined_logprobs(events: list[Any]) -> dict[str, list[Any]]:
    """The lists of all chunks, one after the other."""
    joined: dict[str, list[Any]] = {}
    for event in events:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    return joined


async def test_choices_go_through_the_prompts_and_their_answers(stage: Stage) -> None:
    stage.script = lambda request: [Output(request.request_id, request.prompt_token_ids, "length")]
    body = {"prompt": ["a", "b"], "n": 2, "return_token_ids": True}
    status, answer = await stage.post(COMPLETIONS, body)
    assert status == 200
    told = [(c["index"], c["text"], c["prompt_token_ids"]) for c in answer["choices"]]
    assert told == [(i, text, byte_ids(text)) for i, text in enumerate("aabb")]
    assert answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 4} == answer["usage"]
    events = await stage.stream(COMPLETIONS, body)
    assert [text_of(events, index) for index in range(4)] == ["a", "a", "b", "b"]


async def test_more_answers_than_the_engine_takes_are_refused(stage: Stage) -> None:
    status, answer = await stage.post(COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 3})
    assert (status, answer["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("prompt", ["hi", byte_ids("hi")])
async def test_echo_puts_the_prompt_first(stage: Stage, prompt: object) -> None:
    body = {"prompt": prompt, "echo": True, "n": 2, "return_token_ids": True}
    _, answer = await stage.post(COMPLETIONS, body)
    assert [choice["text"] for choice in answer["choices"]] == ["hihello", "hihello"]
    assert answer["choices"][0]["token_ids"] == byte_ids("hello")
    events = await stage.stream(COMPLETIONS, body)
    for index in (0, 1):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        first = mine[0]["choices"][0]
        assert (first["text"], first["finish_reason"], first["prompt_token_ids"]) == ("hi", None, byte_ids("hi"))
        assert "num_cached_tokens" in mine[0]
        assert text_of(mine, index) == "hihello"
        assert all("prompt_token_ids" not in event["choices"][0] for event in mine[1:])


async def test_echo_of_special_tokens_is_up_to_the_request(stage: Stage) -> None:
    prompt = [IM_END, *byte_ids("hi")]
    for skip, shown in ((True, "hi"), (False, "<|im_end|>hi")):
        _, answer = await stage.post(COMPLETIONS, {"prompt": prompt, "echo": True, "skip_special_tokens": skip})
        assert answer["choices"][0]["text"] == shown + "hello"


@pytest.mark.parametrize("ids", [[1, 2, 3], [-1], "abc", []])
async def test_echo_ignores_the_ids_of_a_router(decode: Stage, ids: object) -> None:
    body = {"prompt": "hi", "echo": True, "kv_transfer_params": params_for_decode(prompt_token_ids=ids)}
    status, answer = await decode.post(COMPLETIONS, body)
    assert status == 200
    assert answer["choices"][0]["text"] == "hihello"
    assert decode.submitted[0].prompt_token_ids == byte_ids("hi")


async def test_logprobs_of_the_answer(stage: Stage) -> None:
    stage.script = with_logprobs
    for count, top in ((0, {}), (1, {"x": -0.5}), (2, {"x": -0.5})):
        body = {"prompt": "hi", "logprobs": count}
        _, answer = await stage.post(COMPLETIONS, body)
        expected = {
            "tokens": ["a", "b"],
            "token_logprobs": [-1.0, -1.0],
            "top_logprobs": [{"a": -1.0} | top, {"b": -1.0} | top],
            "text_offset": [0, 1],
        }
        assert answer["choices"][0]["logprobs"] == expected
        assert stage.submitted[-1].sampling.logprobs == count
        assert joined_logprobs(await stage.stream(COMPLETIONS, body)) == expected
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_logprobs_with_echo_begin_with_the_prompt(stage: Stage) -> None:
    stage.script = with_logprobs
    body = {"prompt": "hi", "logprobs": 1, "echo": True}
    expected = {
        "tokens": ["h", "i", "a", "b"],
        "token_logprobs": [None, -1.0, -1.0, -1.0],
        "top_logprobs": [None, *({token: -1.0, "x": -0.5} for token in "iab")],
        "text_offset": [0, 1, 2, 3],
    }
    _, answer = await stage.post(COMPLETIONS, body)
    assert answer["choices"][0]["logprobs"] == expected
    assert stage.submitted[-1].sampling.prompt_logprobs == 1
    events = await stage.stream(COMPLETIONS, body)
    assert events[0]["choices"][0]["logprobs"]["tokens"] == ["h", "i"]
    assert joined_logprobs(events) == expected


async def test_tokens_as_ids(stage: Stage) -> None:
    stage.script = with_logprobs
    body = {"prompt": "hi", "logprobs": 0, "return_tokens_as_token_ids": True}
    _, answer = await stage.post(COMPLETIONS, body)
    names = [f"token_id:{token}" for token in byte_ids("ab")]
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == names
    assert [list(top) for top in told["top_logprobs"]] == [[name] for name in names]
    assert told["text_offset"] == [0, 1]


async def test_prompt_logprobs_are_by_id(stage: Stage) -> None:
    stage.script = with_logprobs
    (x,), (i,) = byte_ids("x"), byte_ids("i")
    body = {"prompt": "hi", "prompt_logprobs": 1}
    _, answer = await stage.post(COMPLETIONS, body)
    expected = [
        None,
        {
            str(i): {"logprob": -1.0, "rank": 2, "decoded_token": "i"},
            str(x): {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
        },
    ]
    assert answer["choices"][0]["prompt_logprobs"] == expected
    assert answer["choices"][0]["logprobs"] is None
    events = await stage.stream(COMPLETIONS, body)
    assert events[0]["choices"][0]["prompt_logprobs"] == expected
    assert all("prompt_logprobs" not in event["choices"][0] for event in events[1:])


async def test_echo_alone_tells_the_prompt_and_generates_nothing(stage: Stage) -> None:
    stage.script = with_logprobs
    body = {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    status, answer = await stage.post(COMPLETIONS, body)
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("hi", "length", [])
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert answer["usage"] | {"completion_tokens": 0, "total_tokens": 2} == answer["usage"]
    assert stage.submitted[0].sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ],
)
async def test_bad_values_are_refused_naming_the_field(stage: Stage, change: dict[str, Any], param: str) -> None:
    status, answer = await stage.post(COMPLETIONS, {"prompt": "hi"} | change)
    assert (status, answer["error"]["param"]) == (400, param)
    assert stage.submitted == []


@pytest.mark.parametrize("change", [{"best_of": 2, "n": 2}, {"best_of": 1}, {"best_of": 1, "n": 2}, {"suffix": ""}])
async def test_values_that_ask_for_nothing_more_are_taken(stage: Stage, change: dict[str, Any]) -> None:
    assert (await stage.post(COMPLETIONS, {"prompt": "hi"} | change))[0] == 200


async def test_response_format_becomes_a_grammar(stage: Stage) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    named = {"name": "nothing", "schema": schema, "strict": True}
    for wanted, kind in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "json_schema": named}, "json_schema"),
    ):
        assert (await stage.post(COMPLETIONS, {"prompt": "hi", "response_format": wanted}))[0] == 200
        grammar = stage.submitted[-1].sampling.grammar
        assert kind == (grammar.kind if isinstance(grammar, GrammarSpec) else None)


async def test_what_all_prompts_share_is_worked_out_once(stage: Stage) -> None:
    before = stage.tokenizer.calls
    body = {"prompt": [[1], [2, 3], [4]], "bad_words": ["hi"], "n": 2, "max_tokens": 250, "min_tokens": 250}
    status, _ = await stage.post("/v1/completions", body)
    assert status == 200
    assert stage.tokenizer.calls - before == 2  # the word by itself, and after a space
    rooms = {len(r.prompt_token_ids): r.sampling for r in stage.submitted}
    assert {size: params.max_tokens for size, params in rooms.items()} == {1: 250, 2: 250}
    assert all(r.sampling.bad_words for r in stage.submitted)


async def test_answers_to_one_prompt_have_block_hashes_of_their_own(stage: Stage) -> None:
    status, _ = await stage.post("/v1/completions", {"prompt": [1] * 40, "n": 2})
    assert status == 200
    first, second = stage.submitted
    assert first.block_hashes == second.block_hashes
    assert len(first.block_hashes) == 2
    assert first.block_hashes is not second.block_hashes

"""The stream of /inference/v1/generate, event by event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.api.generate import GenerateShape
from engine.messages import Output
from engine.request import Request
from tests.unit.server.double import Script, Stage, byte_ids, one_by_one, says

GENERATE = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": byte_ids("hi")}
WITH_USAGE = BODY | {"stream_options": {"include_usage": True}}
END = {"finish_reason": "length"}


@pytest.fixture
async def stage(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model) as stage:
        yield stage


def outputs(*told: tuple[str, dict[str, Any]]) -> Script:
    """Outputs with these characters, each of which the server takes on its own."""

    def script(request: Request) -> Iterable[Output]:
        for text, more in told:
            yield Output(request.request_id, byte_ids(text), **more)

    return one_by_one(script)


def choices_of(events: list[Any]) -> list[tuple[int, list[int], str | None]]:
    choices = [event["choices"][0] for event in events]
    return [(choice["index"], choice["token_ids"], choice["finish_reason"]) for choice in choices]


async def test_item_110_each_event_has_what_is_new(stage: Stage) -> None:
    stage.script = outputs(("a", {}), ("bc", {}), ("d", END))
    events = await stage.stream(GENERATE, BODY | {"request_id": "mine"})
    assert choices_of(events) == [(0, byte_ids("a"), None), (0, byte_ids("bc"), None), (0, byte_ids("d"), "length")]
    assert [event["request_id"] for event in events] == ["mine"] * 3
    assert [event["choices"][0]["stop_reason"] for event in events] == [None] * 3


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_item_110_stop_reason_is_the_string_or_the_token(stage: Stage, mode: str) -> None:
    body = BODY | {"output_mode": mode, "sampling_params": {"stop": ["lo"], "stop_token_ids": byte_ids("!")}}
    for script, reason in (
        (says("he!", finish_reason="stop", stop_token_id=byte_ids("!")[0]), byte_ids("!")[0]),
        (says("he", finish_reason="stop"), None),
        (lambda request: [Output(request.request_id, [token]) for token in byte_ids("hello")], "lo"),
    ):
        stage.script = script
        (choice,) = (await stage.post(GENERATE, body))[1]["choices"]
        last = (await stage.stream(GENERATE, body))[-1]["choices"][0]
        for told in (choice, last):
            assert (told["finish_reason"], told["stop_reason"]) == ("stop", reason)


@pytest.mark.parametrize("asked", [False, True])
async def test_item_111_prompt_ids_are_on_the_first_event_there_is(stage: Stage, asked: bool) -> None:
    """Outputs without tokens come before it."""
    stage.script = outputs(("", {}), ("", {}), ("a", {}), ("b", END))
    events = await stage.stream(GENERATE, WITH_USAGE | {"return_token_ids": asked})
    assert choices_of(events[:-1]) == [(0, byte_ids("a"), None), (0, byte_ids("b"), "length")]
    told = [event.get("prompt_token_ids") for event in events]
    assert told == [byte_ids("hi") if asked else None, None, None]


async def test_item_112_an_end_without_tokens_is_an_event_and_nothing_else_without_them_is(stage: Stage) -> None:
    stage.script = outputs(("a", {}), ("", {}), ("", {}), ("", END))
    assert choices_of(await stage.stream(GENERATE, BODY)) == [(0, byte_ids("a"), None), (0, [], "length")]


async def test_item_112_one_of_several_answers_may_begin_before_another(stage: Stage) -> None:
    """The first has an output without tokens, which lets the second begin, and only then its tokens."""
    others: list[Request] = []

    def script(request: Request) -> Iterable[Output]:
        if not others:
            others.append(request)
            yield Output(request.request_id, [])
            return
        yield Output(request.request_id, byte_ids("b"), "length")
        yield Output(others[0].request_id, byte_ids("a"))
        yield Output(others[0].request_id, [], "length")

    stage.script = one_by_one(script)
    events = await stage.stream(GENERATE, BODY | {"return_token_ids": True, "sampling_params": {"n": 2}})
    assert choices_of(events) == [(1, byte_ids("b"), "length"), (0, byte_ids("a"), None), (0, [], "length")]
    assert [event.get("prompt_token_ids") for event in events] == [byte_ids("hi"), None, None]


@pytest.mark.parametrize("whose", ["the engine's", "ours"])
async def test_item_113_an_error_in_the_middle_is_an_event_before_done(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """A fault of the server's own code too, whose details are nobody's business."""
    stage.script = outputs(("a", {}), ("b", {"finish_reason": "error", "error": "broken"}))
    if whose == "ours":
        stage.script = outputs(("a", {}), ("b", END))
        monkeypatch.setattr(GenerateShape, "events", _failing(GenerateShape.events))
    first, second = await stage.stream(GENERATE, BODY)
    assert choices_of([first]) == [(0, byte_ids("a"), None)]
    message = "broken" if whose == "the engine's" else "internal error"
    assert second["error"] == {"message": message, "type": "InternalServerError", "param": None, "code": 500}


def _failing(events: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def fail(shape: Any, choice: Any, delta: Any) -> list[Any]:
        if choice.finish_reason:
            raise RuntimeError("a secret")
        return events(shape, choice, delta)

    return fail


@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize("continuous", [False, True])
async def test_item_114_usage_tells_cached_tokens_even_if_there_are_none(
    stage: Stage, cached: int, continuous: bool
) -> None:
    stage.script = outputs(("a", {"num_cached_tokens": cached}), ("b", END | {"num_cached_tokens": cached}))
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    events = await stage.stream(GENERATE, BODY | {"stream_options": options})
    assert [event["choices"] == [] for event in events] == [False, False, True]

    def usage(num_output: int) -> dict[str, Any]:
        counts = {"prompt_tokens": 2, "completion_tokens": num_output, "total_tokens": 2 + num_output}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    told = [event.get("usage") for event in events]
    assert told == ([usage(1), usage(2), usage(2)] if continuous else [None, None, usage(2)])


async def test_item_116_text_may_come_without_ids_when_it_was_held_back(stage: Stage) -> None:
    """It might have been the beginning of a stop string; the end of the answer says that it was not."""
    stage.script = outputs(("h", {}), ("el", {}), ("", END))
    body = WITH_USAGE | {"output_mode": "text", "sampling_params": {"stop": ["lo"]}}
    *events, usage = await stage.stream(GENERATE, body)
    assert [(*told, event["choices"][0]["text"]) for told, event in zip(choices_of(events), events, strict=True)] == [
        (0, byte_ids("h"), None, "h"),
        (0, byte_ids("el"), None, "e"),
        (0, [], "length", "l"),
    ]
    assert {event["output_mode"] for event in (*events, usage)} == {"text"}
    assert usage["usage"]["completion_tokens"] == 3

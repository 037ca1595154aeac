"""Every endpoint is the same turn: two legs, params between them, a record after them, nothing of it for the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.router_harness import Answer, Front, router_over
from tests.stub_engine import OUTPUT_IDS, PROMPT_IDS, TEXT, StubEngine

NAMED = {"X-Conversation-Id": "talk"}
INTERNAL = (b"_transfer_params", b"token_note", b"remote_", b"prompt_token_ids", b"num_cached_tokens")


@dataclass(frozen=True)
class Door:
    path: str
    body: dict[str, Any]
    limits: dict[str, Any]
    """What a client may say of the length of its answer, by the names this endpoint has for it."""
    capped: dict[str, Any]
    """What the prefill leg makes of that."""
    prompt_ids: list[int] = field(default_factory=lambda: PROMPT_IDS)

    def ids_of(self, leg: dict[str, Any]) -> list[int] | None:
        """The ids that a decode leg brings along, wherever this endpoint has them."""
        if "prompt" in self.body:
            return list(leg["prompt"])
        if "token_ids" in self.body:
            return list(leg["token_ids"])
        params = leg["kv_transfer_params"]
        return params.get("prompt_token_ids")  # type: ignore[no-any-return]


DOORS = {
    "chat": Door(
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
        {"max_completion_tokens": 50, "min_tokens": 5, "stop": ["x"]},
        {"max_tokens": 1, "max_completion_tokens": 1},
    ),
    "completions": Door(
        "/v1/completions",
        {"model": "m", "prompt": "Hi"},
        {"max_tokens": 50, "min_tokens": 5, "stop": ["x"]},
        {"max_tokens": 1},
    ),
    "responses": Door(
        "/v1/responses", {"model": "m", "input": "Hi"}, {"max_output_tokens": 50}, {"max_output_tokens": 1}
    ),
    "generate": Door(
        "/inference/v1/generate",
        {"model": "m", "token_ids": [5, 6, 7]},
        {"sampling_params": {"max_tokens": 50, "min_tokens": 5, "stop": ["x"], "temperature": 0.5}},
        {"sampling_params": {"max_tokens": 1, "n": 1, "temperature": 0.5}},
        [5, 6, 7],
    ),
}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EVERY = pytest.mark.parametrize("name", DOORS)


@pytest.fixture(params=["ours", "foreign"])
async def pair(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[tuple[Front, StubEngine, StubEngine]]:
    whose = {} if request.param == "ours" else {"owned_by": "vllm", "kv_layout": None}
    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
    async with (
        StubEngine("prefill", **whose).running() as p,
        StubEngine("decode", **whose).running() as d,
        router_over([p], [d], redis_url, kv_recompute_threshold=0, decode_only_tokens=0) as front,
    ):
        yield front, p, d


@EVERY
@STREAM
async def test_params_and_ids_go_all_the_way(
    pair: tuple[Front, StubEngine, StubEngine], name: str, stream: bool
) -> None:
    front, p, d = pair
    door = DOORS[name]
    asked = {**door.body, **door.limits, "stream": stream, "seed": 7}
    answer = await front.post(asked, path=door.path, headers=NAMED)
    assert answer.status == 200, answer.raw
    assert not any(key in answer.raw for key in INTERNAL)
    assert text_of(name, answer, stream) == (OUTPUT_IDS if name == "generate" else TEXT)

    to_p, to_d = p.bodies[0], d.bodies[0]
    assert to_p["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert {key: to_p[key] for key in door.capped} == door.capped
    assert to_p["stream"] is False
    assert not {"stream_options", "min_tokens", "stop"} & {*to_p, *to_p.get("sampling_params", ())}
    assert to_p["seed"] == to_d["seed"] == 7
    assert to_d["kv_transfer_params"]["remote_engine_id"] == "prefill-engine"
    assert to_d["kv_transfer_params"]["do_remote_prefill"] is True
    assert door.ids_of(to_d) == door.prompt_ids
    assert {key: to_d[key] for key in door.limits} == door.limits
    assert [seen.path for seen in (*p.seen, *d.seen)] == [door.path] * 2

    explained = await front.post(asked, path=door.path, headers=NAMED | {"X-Backhaul-Explain": "1"})
    assert explained.explain["turn"] == 2, "the first turn was remembered"
    offered = p.bodies[1]["kv_transfer_params"]
    assert offered["do_remote_decode"] is True
    if d.owned_by == "backhaul" or name == "generate":
        assert offered["remote_engine_id"] == "decode-engine", "and its blocks are offered to the next prefill"
    else:
        assert "remote_engine_id" not in offered, "these engines tell no ids, so nothing can be compared"


@EVERY
@STREAM
async def test_what_the_client_asks_for_it_gets(
    pair: tuple[Front, StubEngine, StubEngine], name: str, stream: bool
) -> None:
    front, _, d = pair
    door = DOORS[name]
    asked: dict[str, Any] = {**door.body, "stream": stream, "return_token_ids": True}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    answer = await front.post(asked, path=door.path)
    if d.owned_by == "backhaul" or name != "responses":  # where others have no such thing
        assert b'"prompt_token_ids"' in answer.raw
    assert b'"usage"' in answer.raw
    assert b"token_note" not in answer.raw
    assert b"_transfer_params" not in answer.raw


@EVERY
@STREAM
async def test_an_operator_may_look_at_the_params(redis_url: str, name: str, stream: bool) -> None:
    door = DOORS[name]
    async with (
        StubEngine("prefill").running() as p,
        StubEngine("decode").running() as d,
        router_over([p], [d], redis_url, expose_transfer_params=True) as front,
    ):
        answer = await front.post({**door.body, "stream": stream}, path=door.path, headers=NAMED)
        assert b'"remote_engine_id":"decode-engine"' in answer.raw
        assert b"token_note" not in answer.raw


@EVERY
@STREAM
async def test_events_that_hold_nothing_of_ours_pass_byte_for_byte(
    front: Front, d: StubEngine, name: str, stream: bool
) -> None:
    door = DOORS[name]
    sent = {**door.body, "stream": True, "stream_options": {"include_usage": True}}
    plain = [event for event in d.events(sent) if b"_transfer_params" not in event]
    d.stream_params = False
    answer = await front.post(sent, path=door.path)
    untouched = [event for event in plain if event in answer.raw]
    assert len(untouched) >= len(plain) - 2, "all but the first event and the last"


def text_of(name: str, answer: Answer, stream: bool) -> object:
    if name == "responses":
        response = answer.events[-1]["response"] if stream else answer.json
        return response["output"][0]["content"][0]["text"]
    if name == "generate":
        events = answer.events[:-1] if stream else [answer.json]
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    return answer.text if stream else answer.text_of_whole

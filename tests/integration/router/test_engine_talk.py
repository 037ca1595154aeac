"""What only router and engines say to each other: no client can say it, and none gets to hear it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.endpoints import ENDPOINTS, INTERNAL, Endpoint, every_endpoint, streamed_and_whole
from tests.router_harness import Front, router_over
from tests.stub_engine import StubEngine

FORGED = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "prompt_token_ids": [666]}
MARKS = ("666", "10.6.6.6", "666.0", "forged")
SPOKEN: dict[str, dict[str, Any]] = {
    "kv_transfer_params": {"kv_transfer_params": FORGED},
    "ec_transfer_params": {"ec_transfer_params": {"forged": {"peer_host": "10.6.6.6"}}},
    "prompt_token_ids": {"prompt_token_ids": [666]},
    "known_token_ids": {"known_token_ids": [666]},
    "token_note": {"token_note": "forged"},
    "vllm_xargs.kv_transfer_params": {"vllm_xargs": {"kv_transfer_params": FORGED}},
    "vllm_xargs.ec_transfer_params": {"vllm_xargs": {"mine": 1, "ec_transfer_params": {"forged": 1}}},
    "vllm_xargs.my_transfer_params": {"vllm_xargs": {"my_transfer_params": "forged"}},
    "sampling_params.extra_args": {"sampling_params": {"extra_args": {"kv_transfer_params": FORGED}}},
    "sampling_params.kv_transfer_params": {"sampling_params": {"kv_transfer_params": FORGED}},
    "extra_args": {"extra_args": {"kv_transfer_params": FORGED}},
}
HEADERS = ("X-Backhaul-Seal", "x-backhaul-anything")


@pytest.fixture
async def refusing(p: StubEngine, d: StubEngine, redis_url: str) -> AsyncIterator[Front]:
    async with router_over([p], [d], redis_url, client_transfer_params="refuse") as front:
        yield front


@pytest.fixture(params=["ours", "others"])
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[tuple[StubEngine, StubEngine]]:
    whose: dict[str, Any] = {} if request.param == "ours" else {"owned_by": "vllm", "kv_layout": None}
    async with StubEngine("prefill", **whose).running() as p, StubEngine("decode", **whose).running() as d:
        yield p, d


@every_endpoint
@streamed_and_whole
async def test_it_never_reaches_an_engine(
    engines: tuple[StubEngine, StubEngine], redis_url: str, endpoint: Endpoint, stream: bool
) -> None:
    p, d = engines
    async with router_over([p], [d], redis_url) as front:
        for spoken in SPOKEN.values():
            answer = await front.post(endpoint.body(stream=stream, **spoken), path=endpoint.path)
            assert endpoint.said(answer, stream=stream)
            assert not any(mark.encode() in answer.raw for mark in MARKS)
    assert len(p.seen) == len(d.seen) == len(SPOKEN)
    for leg in (*p.seen, *d.seen):
        assert not any(mark in json.dumps(leg.body) for mark in MARKS)
        assert {"ec_transfer_params", "known_token_ids", "extra_args"}.isdisjoint(leg.body)


@every_endpoint
async def test_or_is_refused(refusing: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint) -> None:
    for param, spoken in SPOKEN.items():
        answer = await refusing.post(endpoint.body(**spoken), path=endpoint.path)
        assert (answer.status, answer.error["param"]) == (400, param)
    for name in HEADERS:
        answer = await refusing.post(endpoint.plain, path=endpoint.path, headers={name: "9999999999.0"})
        assert answer.status == 400
        assert answer.error["param"].lower() == name.lower()
    assert not p.seen + d.seen
    plain = await refusing.post(endpoint.plain, path=endpoint.path, headers={"X-Backhaul-Explain": "1"})
    assert endpoint.said(plain, stream=False)
    assert plain.explain["attempts"] == 1


@every_endpoint
@streamed_and_whole
async def test_engines_words_are_not_for_the_client(
    engines: tuple[StubEngine, StubEngine], redis_url: str, endpoint: Endpoint, stream: bool
) -> None:
    p, d = engines
    for exposed in (False, True):
        async with router_over([p], [d], redis_url, expose_transfer_params=exposed) as front:
            named = {"X-Conversation-Id": "one"}
            answer = await front.post(endpoint.body(stream=stream), path=endpoint.path, headers=named)
        assert endpoint.said(answer, stream=stream)
        if exposed:
            assert b'"remote_engine_id":"decode-engine"' in answer.raw
            assert sum(b'"remote_engine_id"' in line for line in answer.raw.splitlines()) == 1
        else:
            assert not any(key in answer.raw for key in INTERNAL)
        assert b"token_note" not in answer.raw


async def test_own_engines_are_asked_for_a_note_and_others_for_ids(
    engines: tuple[StubEngine, StubEngine], redis_url: str
) -> None:
    p, d = engines
    async with router_over([p], [d], redis_url) as front:
        for endpoint in ENDPOINTS.values():
            await front.post(endpoint.plain, path=endpoint.path)
    for endpoint, leg in zip(ENDPOINTS.values(), d.bodies, strict=True):
        ours = d.owned_by == "backhaul"
        # Who was sent the prompt as ids need not tell them; generate brings its own.
        assert leg.get("token_note") == ((True if endpoint.name == "generate" else "output") if ours else None)
        assert leg.get("return_token_ids") is (None if ours or endpoint.name == "responses" else True)

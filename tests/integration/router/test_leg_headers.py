"""Headers on both ways: of the client to every engine of its turn, and of the answer back to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict

from connectors.wire.seal import SEAL_HEADER, SealError, SealKeys
from tests.endpoints import ENDPOINTS, Endpoint, every_endpoint, streamed_and_whole
from tests.router_harness import CHAT, Answer, Front, router_over
from tests.stub_engine import TEXT, StubEngine

KEY = "a secret of router and engines"
EXPLAIN = {"X-Backhaul-Explain": "1"}
TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
    "baggage": "user=7",
    "X-Vllm-Priority": "3",
    "X-Request-Id": "turn-7",
    "Authorization": "Bearer key",
}


@pytest.fixture
async def pair(redis_url: str) -> AsyncIterator[tuple[StubEngine, StubEngine]]:
    """Engines that tokenize, so that a second turn has all the requests that a turn can have."""
    async with (
        StubEngine("prefill", tokenizes=True).running() as p,
        StubEngine("decode", tokenizes=True).running() as d,
    ):
        yield p, d


async def test_context_of_the_client_is_on_every_request_of_a_turn(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CIMultiDict[str]] = []
    tokenize = StubEngine._tokenize

    async def noted(engine: StubEngine, request: web.Request) -> web.StreamResponse:
        asked.append(CIMultiDict(request.headers))
        return await tokenize(engine, request)

    monkeypatch.setattr(StubEngine, "_tokenize", noted)
    async with (
        StubEngine("prefill", tokenizes=True).running() as p,
        StubEngine("decode", tokenizes=True).running() as d,
        router_over([p], [d], redis_url, kv_recompute_threshold=0, decode_only_tokens=0) as front,
    ):
        named = {**TRACE, "X-Conversation-Id": f"trace-{p.url}"}
        for endpoint in (ENDPOINTS["chat"], ENDPOINTS["responses"]):
            for _ in range(2):
                answer = await front.post(endpoint.body(priority=-2), path=endpoint.path, headers=named)
                assert answer.headers["X-Request-Id"] == "turn-7"
    assert asked, "the second turn asks for the ids of its prompt"
    for headers in (*asked, *(leg.headers for leg in (*p.seen, *d.seen))):
        assert {name: headers.getall(name) for name in TRACE} == {name: [value] for name, value in TRACE.items()}
    assert [body["priority"] for body in (*p.bodies, *d.bodies)] == [-2] * 8


@every_endpoint
@streamed_and_whole
async def test_request_id_is_made_and_the_same_everywhere(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ids = []
    for given in ({}, {"X-Request-Id": "mine"}, {"X-Request-Id": "not fit"}):
        p.seen.clear()
        d.seen.clear()
        caplog.clear()
        answer = await front.post(endpoint.body(stream=stream), path=endpoint.path, headers=given)
        [told] = answer.headers.getall("X-Request-Id")
        assert [leg.headers.getall("X-Request-Id") for leg in (*p.seen, *d.seen)] == [[told], [told]]
        [line] = [record for record in caplog.records if record.name == "router.turn"]
        assert line.__dict__["request_id"] == told
        ids.append(told)
    assert ids[1] == "mine"
    assert len(set(ids)) == 3
    assert all(id.isalnum() for id in ids)


@pytest.mark.parametrize("seal_key", [None, KEY], ids=["plain", "sealed"])
async def test_headers_with_several_values_keep_them(
    p: StubEngine, d: StubEngine, redis_url: str, seal_key: str | None
) -> None:
    async with (
        router_over([p], [d], redis_url, seal_key=seal_key) as front,
        front.client.post(
            front.url + "/v1/chat/completions",
            json=CHAT,
            headers=CIMultiDict([("baggage", "a=1"), ("baggage", "b=2"), ("X-Custom", "1"), ("X-Custom", "2")]),
        ) as answer,
    ):
        assert answer.status == 200
    for leg in (*p.seen, *d.seen):
        assert leg.headers.getall("baggage") == ["a=1", "b=2"]
        assert leg.headers.getall("X-Custom") == ["1", "2"]


async def test_hop_by_hop_headers_cross_neither_way(front: Front, p: StubEngine, d: StubEngine) -> None:
    """Those named by Connection are of that kind too."""

    async def answers(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"Connection": "close, X-Their-Hop", "X-Their-Hop": "1", "Keep-Alive": "timeout=9", "X-Kept": "1"}
        return web.json_response(d.whole(body), headers=headers)

    d.scripts.append(answers)
    hops = {"Connection": "keep-alive, X-Our-Hop, traceparent", "X-Our-Hop": "1", "TE": "trailers", "Keep-Alive": "1"}
    hops |= {"Proxy-Authorization": "x", "Upgrade": "h2c", "Trailer": "X-T", "Proxy-Connection": "close"}
    answer = await front.post(CHAT, headers={**hops, "traceparent": "00-1", "X-Kept": "1"})
    assert answer.status == 200
    for leg in (*p.seen, *d.seen):
        assert not ({*hops, "traceparent"} - {"Connection"}) & set(leg.headers)
        assert "X-Our-Hop" not in leg.headers.get("Connection", "")
        assert leg.headers["X-Kept"] == "1"
    assert not {"X-Their-Hop", "Keep-Alive"} & set(answer.headers)
    assert answer.headers["X-Kept"] == "1"


@every_endpoint
@streamed_and_whole
async def test_one_of_each_header_that_is_ours(front: Front, d: StubEngine, endpoint: Endpoint, stream: bool) -> None:
    async def answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = "text/event-stream; charset=utf-8" if stream else "application/json; charset=utf-8"
        data = b"".join(d.events(body)) if stream else json.dumps(d.whole(body)).encode()
        theirs = {"Server": "uvicorn", "Date": "Thu, 01 Jan 1970 00:00:00 GMT", "X-Request-Id": "theirs"}
        return web.Response(body=data, headers={**theirs, "Content-Type": kind, "Cache-Control": "no-store"})

    d.scripts.append(answers)
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path)
    assert endpoint.said(answer, stream=stream)
    only_one(answer)
    kind = "text/event-stream" if stream else "application/json"
    assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert "1970" not in answer.headers["Date"]
    assert len(answer.headers.getall("Cache-Control")) == 1
    assert answer.headers.get("Content-Length") == (None if stream else str(len(answer.raw)))
    for body, path in ((b"{", endpoint.path), (endpoint.compact(), "/v2/nothing")):
        only_one(await front.post(body, path=path))


async def test_answers_that_are_no_json_keep_their_type(front: Front, p: StubEngine) -> None:
    async def sings(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=b"RIFF\x00", content_type="audio/wav", headers={"Server": "uvicorn"})

    p.scripts.append(sings)
    answer = await front.post(CHAT, path="/v1/chat/completions/render")
    assert (answer.raw, answer.headers["Content-Type"]) == (b"RIFF\x00", "audio/wav")
    assert answer.headers["Content-Length"] == "5"
    only_one(answer)


def only_one(answer: Answer) -> None:
    for name in ("Server", "Date", "Content-Type", "X-Request-Id"):
        assert len(answer.headers.getall(name)) == 1, name
    assert answer.headers["Server"] == "backhaul"


@every_endpoint
async def test_headers_of_ours_are_no_clients_to_send(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint
) -> None:
    forged = {"X-Backhaul-Seal": "9999999999.0", "x-backhaul-anything": "1", "X-Data-Parallel-Rank": "3"}
    answer = await front.post(endpoint.plain, path=endpoint.path, headers=forged | EXPLAIN)
    assert answer.explain["attempts"] == 1
    for leg in (*p.seen, *d.seen):
        assert [name for name in leg.headers if name.lower().startswith("x-backhaul")] == ["X-Backhaul-Leg"]
        assert len(leg.headers["X-Backhaul-Leg"]) == 32, "of the router's making"
        assert "X-Data-Parallel-Rank" not in leg.headers


@every_endpoint
async def test_headers_of_ours_from_an_engine_do_not_pass_for_the_routers(
    front: Front, d: StubEngine, endpoint: Endpoint
) -> None:
    async def answers(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(d.whole(body), headers={"X-Backhaul-Turn": "99", "X-Backhaul-Secret": "1"})

    d.scripts.extend([answers] * 2)
    assert not [name for name in (await front.post(endpoint.plain, path=endpoint.path)).headers if "Backhaul" in name]
    answer = await front.post(endpoint.plain, path=endpoint.path, headers=EXPLAIN)
    assert answer.headers.getall("X-Backhaul-Turn") == [str(answer.explain["turn"])]
    assert answer.explain["turn"] != 99


@every_endpoint
@streamed_and_whole
async def test_params_are_sealed_for_the_very_body_sent(
    pair: tuple[StubEngine, StubEngine], redis_url: str, endpoint: Endpoint, stream: bool
) -> None:
    p, d = pair
    keys = SealKeys((KEY.encode(),))
    settings: dict[str, Any] = {"seal_key": KEY, "kv_recompute_threshold": 0, "decode_only_tokens": 0}
    asked = endpoint.body(stream=stream, user="Grüß \u2028", seed=2**53 + 1, metadata={"x": [1.5, 1e300, None]})
    named = {"X-Conversation-Id": f"{endpoint.name}-{stream}-{p.url}", SEAL_HEADER: "9999999999.0"}
    async with router_over([p], [d], redis_url, **settings) as front:
        for _ in range(2):
            assert endpoint.said(await front.post(asked, path=endpoint.path, headers=named), stream=stream)
    assert len(p.seen) == len(d.seen) == 2
    assert p.bodies[1]["kv_transfer_params"]["remote_engine_id"] == "decode-engine", "the second turn has an offer"
    for leg in (*p.seen, *d.seen):
        [seal] = leg.headers.getall(SEAL_HEADER)
        keys.check(seal, leg.path, leg.body)
        with pytest.raises(SealError):
            keys.check(seal, "/v1/elsewhere", leg.body)
        with pytest.raises(SealError):
            keys.check(seal, leg.path, {**leg.body, "kv_transfer_params": {"do_remote_decode": True}})


async def test_requests_without_params_are_not_sealed(d: StubEngine, redis_url: str) -> None:
    async with router_over([], [d], redis_url, seal_key=KEY) as front:
        assert (await front.post(CHAT)).text_of_whole == TEXT
    assert SEAL_HEADER not in d.seen[0].headers

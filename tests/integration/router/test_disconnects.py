"""A client that leaves takes its turn with it, in whatever phase: engines hear of it, and nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from redis.asyncio import Redis

from connectors.wire import sse
from tests.endpoints import ENDPOINTS, Endpoint, every_endpoint, streamed_and_whole
from tests.router_harness import Front, router_over, until
from tests.stub_engine import Script, StubEngine, refuse

WITHIN = 1.0
NAMED = {"X-Conversation-Id": "left"}


async def never(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("only the client's leaving ends this wait")


def stalls_after(engine: StubEngine, num_events: int, begun: asyncio.Event | None = None) -> Script:
    """Send the beginning of an answer, then nothing."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await engine.play(request, engine.events(body)[:num_events])
        if begun is not None:
            begun.set()
        return await never(request, body)

    return script


async def leave(front: Front, endpoint: Endpoint, stream: bool, when: Callable[[], object]) -> None:
    """Ask, and close the connection once it is time."""
    request = asyncio.create_task(front.post(endpoint.body(stream=stream), path=endpoint.path, headers=NAMED))
    await until(when, "the moment to leave")
    request.cancel()
    await asyncio.wait([request])
    assert request.cancelled()


@asynccontextmanager
async def nothing_kept(front: Front, redis_url: str) -> AsyncIterator[None]:
    """Neither a record, nor a connection to an engine, nor a count; and the turn is counted as left."""
    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
        yield
        await until(front.is_settled, "settled", WITHIN)
        assert await redis.keys("*") == []
    assert busy_connections(front) == 0
    assert [engine.in_flight for engine in front.router.pool.engines] == [0, 0]
    assert await front.metric("backhaul_router_turns_total", outcome="client_gone") == 1


def busy_connections(front: Front) -> int:
    return front.router.upstream._client.num_busy


@every_endpoint
@streamed_and_whole
async def test_while_prefill_runs(
    front: Front, p: StubEngine, d: StubEngine, redis_url: str, endpoint: Endpoint, stream: bool
) -> None:
    p.scripts.append(never)
    async with nothing_kept(front, redis_url):
        await leave(front, endpoint, stream, lambda: p.seen)
        await until(lambda: p.aborted == 1, "prefill hears of it", WITHIN)
    assert not d.seen


@every_endpoint
@streamed_and_whole
async def test_as_prefill_answers(
    front: Front, p: StubEngine, d: StubEngine, redis_url: str, endpoint: Endpoint, stream: bool
) -> None:
    """Its blocks are held for a decode leg that will not come, and only the answer on its way says which they are."""
    answer = asyncio.Event()

    async def held(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await answer.wait()
        return web.json_response(p.whole(body))

    p.scripts.append(held)
    async with nothing_kept(front, redis_url):
        await leave(front, endpoint, stream, lambda: p.seen)
        await until(lambda: not front.router.turns.count, "the router has heard of it", WITHIN)
        answer.set()
        await until(lambda: p.released, "the blocks are given back", WITHIN)
    assert p.released == [{"engine_id": "prefill-engine", "request_id": "prefill-1"}]
    assert not d.seen


@every_endpoint
@streamed_and_whole
async def test_before_decode_answers(
    front: Front, p: StubEngine, d: StubEngine, redis_url: str, endpoint: Endpoint, stream: bool
) -> None:
    d.scripts.append(never)
    async with nothing_kept(front, redis_url):
        await leave(front, endpoint, stream, lambda: d.seen)
        await until(lambda: d.aborted == 1, "decode hears of it", WITHIN)
        await until(lambda: p.released, "the blocks are given back", WITHIN)
    assert p.released == [{"engine_id": "prefill-engine", "request_id": "prefill-1"}]


@every_endpoint
async def test_while_decode_streams(
    front: Front, p: StubEngine, d: StubEngine, redis_url: str, endpoint: Endpoint
) -> None:
    """Nothing need be on its way: the engine says no more, and the client reads no more."""
    d.scripts.append(stalls_after(d, 3))
    async with nothing_kept(front, redis_url):
        async with front.client.post(
            front.url + endpoint.path, json=endpoint.body(stream=True), headers=NAMED
        ) as answer:
            await answer.content.readany()
            answer.close()
        await until(lambda: d.aborted == 1, "decode hears of it", WITHIN)
    assert not p.released, "the decode engine had taken the blocks over"


@pytest.mark.parametrize("endpoint", [ENDPOINTS["chat"], ENDPOINTS["responses"]], ids=lambda each: each.name)
async def test_while_the_prompt_is_tokenized(
    d: StubEngine, redis_url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last turn's offer, taken from the store for this one, goes back there."""
    asked = asyncio.Event()

    async def hangs(_: StubEngine, request: web.Request) -> web.StreamResponse:
        asked.set()
        return await never(request, {})

    monkeypatch.setattr(StubEngine, "_tokenize", hangs)
    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
    async with (
        StubEngine("prefill").running() as slow,
        router_over([slow], [d], redis_url, tokenize_timeout=60, kv_recompute_threshold=0) as front,
    ):
        await front.post(endpoint.plain, path=endpoint.path, headers=NAMED)
        await leave(front, endpoint, False, asked.is_set)
        await until(front.is_settled, "settled", WITHIN)
        assert busy_connections(front) == 0
        assert not d.released
        [key] = await _records(redis_url)
        found = await front.router.store.claim(key)
        assert found is not None
        assert found.offer is not None


async def _records(redis_url: str) -> list[str]:
    async with Redis.from_url(redis_url) as redis:
        return [key.decode() for key in await redis.keys("*")]


@every_endpoint
async def test_before_the_request_is_whole(front: Front, p: StubEngine, endpoint: Endpoint) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    for sent in (endpoint.compact()[:5], b""):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {endpoint.path} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n".encode() + sent)
        await writer.drain()
        await until(lambda: front.router.turns.count == 1, "the turn has begun")
        writer.close()
        await until(lambda: front.router.turns.count == 0, "it is over", WITHIN)
    assert not p.seen


async def test_fifty_clients_that_leave_are_no_errors(
    front: Front, p: StubEngine, d: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """In every phase, over every endpoint, several at a time."""
    begun = asyncio.Event()

    async def one(number: int) -> None:
        endpoint = list(ENDPOINTS.values())[number % 4]
        asked = asyncio.create_task(front.post(endpoint.body(stream=number % 3 != 0), path=endpoint.path))
        await asyncio.wait([asked], timeout=0.004 * (number % 10))
        asked.cancel()
        await asyncio.wait([asked])

    for engine in (p, d):
        for _ in range(12):
            engine.scripts.append(never)
            if engine is d:
                engine.scripts.append(stalls_after(d, 2, begun))
    for batch in range(5):
        await asyncio.gather(*(one(batch * 10 + number) for number in range(10)))
    for engine in (p, d):
        engine.scripts.clear()
    await until(front.is_settled, "settled")
    assert [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info] == []
    assert busy_connections(front) == 0
    assert (await front.post(ENDPOINTS["chat"].plain)).status == 200


@every_endpoint
@streamed_and_whole
async def test_refusal_by_decode_leaves_no_connection_behind(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, stream: bool
) -> None:
    d.scripts.append(refuse(400, "no such parameter"))
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path)
    assert (answer.status, answer.error["message"]) == (400, "no such parameter")
    await until(lambda: p.released, "the blocks are given back", WITHIN)
    await until(front.is_settled, "settled")
    assert busy_connections(front) == 0


async def test_three_hundred_slow_streams_at_once(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    """All of them have begun before any goes on: neither a limit of connections nor a queue is in between, and once
    they are over no connection is in use."""
    count = 300
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, *rest = d.events(body)
        await response.write(first)
        await go_on.wait()
        for event in rest:
            await response.write(event)
            await asyncio.sleep(0)
        return response

    d.scripts.extend([slow] * count)
    kinds = list(ENDPOINTS.values())
    # All of them are in this test's one loop, which may be too busy to answer a look for long.
    async with router_over([p], [d], redis_url, probe_timeout=60.0) as front:

        async def one(endpoint: Endpoint) -> bool:
            answer = front.client.post(front.url + endpoint.path, json=endpoint.body(stream=True))
            async with answer as response:
                parser, data = sse.SSEParser(), b""
                async for chunk in response.content.iter_any():
                    if not data:
                        begun.release()
                    data += chunk
                    parser.feed(chunk)
            return b"[DONE]" in data or b"response.completed" in data

        async with asyncio.timeout(60):
            streams = [asyncio.create_task(one(kinds[number % 4])) for number in range(count)]
            for _ in range(count):
                await begun.acquire()
            assert front.router.turns.count == count
            go_on.set()
            assert all(await asyncio.gather(*streams))
        await until(front.is_settled, "settled")
        await until(lambda: busy_connections(front) == 0, "no connection is in use, not even for a probe")


@pytest.mark.parametrize("name", ["chat", "completions", "generate"])
async def test_after_the_decode_engine_has_offered_its_blocks(
    front: Front, d: StubEngine, redis_url: str, name: str
) -> None:
    """The turn is not over, so nothing is remembered, and nobody will ask for them."""
    endpoint = ENDPOINTS[name]
    d.scripts.append(stalls_after(d, len(d.events(endpoint.body(stream=True))) - 1))
    async with nothing_kept(front, redis_url):
        async with front.client.post(
            front.url + endpoint.path, json=endpoint.body(stream=True), headers=NAMED
        ) as answer:
            data = b""
            while b'"stop"' not in data:
                data += await answer.content.readany()
            answer.close()
        await until(lambda: d.released, "its blocks are given back", WITHIN)
    assert d.released == [{"engine_id": "decode-engine", "request_id": "decode-1"}]

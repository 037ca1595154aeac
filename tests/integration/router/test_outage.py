"""All engines of a pool are lost: turns of the first moments wait for one to come back, later ones do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.member import FAULTS_UNTIL_EJECTED
from tests.router_harness import CHAT, Front, router_over, until
from tests.stub_engine import TEXT, Script, StubEngine, hang_up, refuse

STREAM: dict[str, Any] = {**CHAT, "stream": True}
WAITS = "backhaul_router_outage_waits_total"


async def disconnect(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    hang_up(request)
    await asyncio.Event().wait()
    raise AssertionError("the connection is gone")


class Mortal(StubEngine):
    """One that can be ended before its test does, and tells which process it is."""

    ends: AsyncExitStack
    process = 1

    def more_routes(self) -> list[web.RouteDef]:
        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=f"process_start_time_seconds 1.78{self.process}e+09\n")

        return [web.get("/metrics", metrics)]


@asynccontextmanager
async def mortal() -> AsyncIterator[Mortal]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Mortal("decode").running())
        assert isinstance(engine, Mortal)
        engine.ends = stack
        yield engine


@asynccontextmanager
async def decoders(
    redis_url: str, count: int, **settings: Any
) -> AsyncIterator[tuple[Front, StubEngine, list[Mortal]]]:
    settings = {"probe_interval": 0.2, "outage_wait": 20.0, "retry_share": 1.0} | settings
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(StubEngine("prefill").running())
        d = [await stack.enter_async_context(mortal()) for _ in range(count)]
        yield await stack.enter_async_context(router_over([p], d, redis_url, **settings)), p, d


def states(front: Front) -> list[str]:
    return [engine.state for engine in front.router.pool.decode]


async def die(front: Front, *engines: Mortal) -> None:
    for engine in engines:
        await engine.ends.aclose()
    await until(lambda: "ready" not in states(front), "nobody is in rotation")


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "streamed"])
async def test_turns_of_the_first_moments_wait(redis_url: str, body: dict[str, Any]) -> None:
    async with decoders(redis_url, 2) as (front, _, d):
        await die(front, *d)
        turns = [asyncio.create_task(front.post(body)) for _ in range(5)]
        await until(lambda: front.router.pool._waiting, "they wait")
        port = int(d[0].url.rpartition(":")[2])
        async with StubEngine("decode").running(port) as back:
            answers = await asyncio.gather(*turns)
            assert {answer.status for answer in answers} == {200}
            assert {answer.text if body is STREAM else answer.text_of_whole for answer in answers} == {TEXT}
            assert len(back.seen) == 5
        assert await front.metric(WAITS, pool="decode") == 5


async def test_outage_that_lasts_is_told_at_once(redis_url: str) -> None:
    async with decoders(redis_url, 2, outage_wait=0.5) as (front, _, d):
        await die(front, *d)
        first = await front.post(CHAT)
        assert (first.status, first.headers["Retry-After"]) == (503, "1")
        await until(lambda: _is_over(front, 0.5), "it lasts")
        again = [await front.post(CHAT) for _ in range(3)]
        assert {answer.status for answer in again} == {503}
        assert await front.metric(WAITS, pool="decode") <= 1, "only the first may have waited"


def _is_over(front: Front, seconds: float) -> bool:
    now = asyncio.get_running_loop().time()
    return all(engine.lost_at + seconds < now for engine in front.router.pool.decode)


async def test_nobody_waits_for_what_has_never_been_there(redis_url: str) -> None:
    async with StubEngine("decode").running() as gone:
        pass
    async with StubEngine("prefill").running() as p, router_over([p], [gone], redis_url, wait=False) as front:
        await until(lambda: front.router.pool.prefill[0].ready, "one is there")
        assert (await front.post(CHAT)).status == 503
        assert await front.metric(WAITS, pool="decode") == 0


async def test_turn_whose_only_engine_is_restarted_goes_on_there(redis_url: str) -> None:
    async with decoders(redis_url, 1) as (front, p, [d]):

        async def crash(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await d.stop_listening()
            return await disconnect(request, body)

        d.scripts.append(crash)
        turn = asyncio.create_task(front.post(CHAT))
        await until(lambda: front.router.pool._waiting, "it waits")
        async with StubEngine("decode").running(int(d.url.rpartition(":")[2])):
            answer = await turn
        assert (answer.status, answer.text_of_whole) == (200, TEXT)
        assert len(p.seen) == 2, "its blocks may have been read"


async def test_ejected_engine_is_tried_when_it_is_the_only_one_left(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.member.EJECTED_SECONDS", 600.0)
    monkeypatch.setattr("router.member.MAX_EJECTED_SECONDS", 600.0)
    async with decoders(redis_url, 2) as (front, _, [ill, well]):
        ill.scripts.extend([refuse(500)] * FAULTS_UNTIL_EJECTED)
        await asyncio.gather(*(front.post(CHAT) for _ in range(2 * FAULTS_UNTIL_EJECTED)))
        assert front.router.pool.get("decode", ill.url).state == "ejected"
        await die(front, well)
        assert (await front.post(CHAT)).status == 200
        assert not ill.scripts


@pytest.mark.parametrize("fault", [refuse(500), disconnect], ids=["status", "broken off"])
async def test_engine_that_failed_the_turn_is_not_waited_for(redis_url: str, fault: Script) -> None:
    """It is there, and has said what it has to say."""
    async with decoders(redis_url, 1) as (front, _, [d]):
        d.scripts.extend([fault] * 3)
        assert (await front.post(CHAT)).status in (500, 502)
        assert await front.metric(WAITS, pool="decode") == 0


async def test_client_that_leaves_while_it_waits_leaves_nothing(redis_url: str) -> None:
    async with decoders(redis_url, 1) as (front, _, d):
        await die(front, *d)
        turn = asyncio.create_task(front.post(CHAT))
        await until(lambda: front.router.pool._waiting, "it waits")
        turn.cancel()
        await until(lambda: not front.router.pool._waiting, "it is gone")
        await until(front.is_idle, "nothing is left")


@pytest.mark.parametrize("restarted", [False, True])
async def test_third_attempt_goes_only_to_an_engine_that_has_survived_the_first(
    redis_url: str, restarted: bool
) -> None:
    """A connection that was cut says nothing against a request; an engine that died of it does."""
    async with decoders(redis_url, 2) as (front, _, d):
        members = [front.router.pool.get("decode", one.url) for one in d]
        await until(lambda: all(one.process for one in members), "both have told which process they are")
        failed: list[Mortal] = []

        def breaking(engine: Mortal) -> Script:
            async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                failed.append(engine)
                if len(failed) == 1:
                    engine.process += restarted
                else:
                    first = front.router.pool.get("decode", failed[0].url)
                    now = asyncio.get_running_loop().time()
                    await until(lambda: first.process_seen_at > now, "the first has been looked at since")
                return await disconnect(request, body)

            return script

        for engine in d:
            engine.scripts.append(breaking(engine))
        answer = await front.post(CHAT)
        assert answer.status == (502 if restarted else 200)
        assert sorted(len(engine.seen) for engine in d) == ([1, 1] if restarted else [1, 2])

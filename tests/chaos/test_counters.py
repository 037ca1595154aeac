"""What is counted up is counted down: after thousands of requests of all kinds, most of which end badly, every count of
what is in flight is exactly 0, and nothing that served them is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.endpoints import ENDPOINTS
from tests.router_harness import Front, router_over, until
from tests.stub_engine import StubEngine, hang_up, refuse
from tests.valkey import free_port, valkey

REQUESTS = 2_000
IN_PARALLEL = 50
ANSWERS = {"ok", "rejected", "failed", "cut", "client_gone"}
DEADLINES = ("prefill_timeout", "first_byte_timeout", "pull_timeout", "idle_timeout")
GAUGES = ("in_flight", "queued", "waiting")
"""In the names of what must be 0 at the end."""

Behaviour = Callable[[StubEngine, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


async def answers(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if body.get("stream"):
        return await engine.play(request, engine.events(body))
    return web.json_response(engine.whole(body))


async def answers_late(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(0.02)
    if body.get("stream"):
        return await engine.play(request, engine.events(body), pause=0.005)
    return web.json_response(engine.whole(body))


async def breaks_off(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    hang_up(request)
    return web.Response()


async def breaks_off_amid(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await engine.play(request, engine.events(body)[:2], cut=True)


async def fails(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await refuse(500)(request, body)


async def refuses(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await refuse(400)(request, body)


async def says_nonsense(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="{", content_type="application/json")


async def hangs(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("the router waits no longer than its deadlines")


BEHAVIOURS: dict[Behaviour, int] = {
    answers: 60,
    answers_late: 15,
    breaks_off: 5,
    breaks_off_amid: 5,
    fails: 5,
    refuses: 4,
    says_nonsense: 4,
    hangs: 2,
}
"""How an engine behaves, and how often against the others."""


def moody(engine: StubEngine, rng: random.Random) -> StubEngine:
    """It does something else with every request."""

    def script(behaviour: Behaviour) -> Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]:
        return lambda request, body: behaviour(engine, request, body)

    chosen = rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()), k=3 * REQUESTS)
    engine.scripts.extend(script(behaviour) for behaviour in chosen)
    return engine


@asynccontextmanager
async def flapping(engine: StubEngine, rng: random.Random) -> AsyncIterator[StubEngine]:
    """It comes and goes, always at the same port."""
    port, there = free_port(), asyncio.Event()

    async def flap() -> None:
        while True:
            async with engine.running(port):
                there.set()
                await asyncio.sleep(rng.uniform(0.1, 0.5))
            await asyncio.sleep(rng.uniform(0.05, 0.3))

    task = asyncio.create_task(flap())
    try:
        await there.wait()
        yield engine
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with valkey(tmp_path) as server:
        yield server.url


async def request(front: Front, rng: random.Random, seen: Counter[str]) -> None:
    """One, of a client that may not wait for its end."""
    endpoint, stream = rng.choice(list(ENDPOINTS.values())), rng.random() < 0.6
    body: Any = endpoint.body(stream=stream)
    match rng.randrange(20):
        case 0:
            body = b"{"
        case 1:
            body["model"] = "nobody"
    headers = {"X-Conversation-Id": f"conversation {rng.randrange(60)}"}
    patience = rng.choice((None, None, None, 0.0, 0.003, 0.01, 0.05))
    try:
        async with asyncio.timeout(patience):
            answer = await front.post(body, path=endpoint.path, headers=headers)
    except TimeoutError:
        seen["left"] += 1
    except aiohttp.ClientPayloadError:
        seen["cut and not told"] += 1
    else:
        seen[str(answer.status)] += 1
        if answer.status == 200 and stream and not endpoint.looks_complete(answer):
            endpoint.told_error(answer)
            seen["cut and told"] += 1


def num_tasks() -> int:
    """Without those that wait for the next request of a connection that is kept open."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return sum(not name.startswith("RequestHandler.") for name in names)


async def test_counts_end_at_zero_after_requests_that_end_in_every_way(store: str) -> None:
    rng, seen = random.Random(6), Counter[str]()
    async with AsyncExitStack() as stack:
        pools = []
        for role in ("prefill", "decode"):
            steady = await stack.enter_async_context(moody(StubEngine(role), rng).running())
            pools.append([steady, await stack.enter_async_context(flapping(moody(StubEngine(role), rng), rng))])
        prefill, decode = pools
        limits: dict[str, Any] = dict.fromkeys(DEADLINES, 0.5) | {"turn_timeout": 2.0}
        router = router_over(prefill, decode, store, probe_interval=0.05, **limits)
        front = await stack.enter_async_context(router)
        tasks_before = num_tasks()
        numbers = iter(range(REQUESTS))

        async def work() -> None:
            for _ in numbers:
                await request(front, rng, seen)

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_PARALLEL):
                group.create_task(work())

        await until(front.is_settled, "all turns have ended", 10)
        assert front.router.turns.count == 0
        assert {engine.url: engine.in_flight for engine in front.router.pool.engines if engine.in_flight} == {}
        text = (await front.get("/metrics")).raw.decode()
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        busy = {name: value for name, value in samples.items() if any(word in name.split("{")[0] for word in GAUGES)}
        assert len(busy) >= 5
        assert {name for name, value in busy.items() if float(value)} == set()
        outcomes = {outcome: await front.metric("backhaul_router_turns_total", outcome=outcome) for outcome in ANSWERS}
        await until(lambda: num_tasks() <= tasks_before + 8, "no task is left of them", 10)
    assert sum(seen.values()) - seen["cut and told"] == REQUESTS
    assert (seen["cut and told"] > 0, seen["cut and not told"]) == (True, 0)
    assert sum(outcomes.values()) <= REQUESTS
    assert all(outcomes.values()), f"the run did not have every outcome: {outcomes}"
    assert seen["200"] > REQUESTS / 10, seen

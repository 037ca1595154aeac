"""Engines that come, go, drain, have too much to do or hang, under turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.discovery.follow import SETTINGS
from router.discovery.source import Found
from router.member import EJECTED_SECONDS, FAULTS_UNTIL_EJECTED
from tests.router_harness import CHAT, Front, operator, router_over, until
from tests.stub_engine import TEXT, StubEngine, refuse

STREAM: dict[str, Any] = {**CHAT, "stream": True}
EXPLAIN = {"X-Backhaul-Explain": "1"}


@asynccontextmanager
async def fleet(
    redis_url: str, *, prefill: int = 2, decode: int = 2, **settings: Any
) -> AsyncIterator[tuple[Front, list[StubEngine], list[StubEngine]]]:
    async with AsyncExitStack() as stack:
        p = [await stack.enter_async_context(StubEngine("prefill").running()) for _ in range(prefill)]
        d = [await stack.enter_async_context(StubEngine("decode").running()) for _ in range(decode)]
        front = await stack.enter_async_context(router_over(p, d, redis_url, **settings))
        yield front, p, d


def state(front: Front, engine: StubEngine) -> str:
    return next(one.state for one in front.router.pool.engines if one.url == engine.url)


async def test_engine_that_joins_serves_and_one_that_leaves_does_not(redis_url: str) -> None:
    async with (
        fleet(redis_url, decode=1) as (front, _, [old]),
        StubEngine("decode").running() as new,
    ):
        pool = front.router.pool
        pool.update("decode", SETTINGS, [Found(old.url), Found(new.url)])
        await until(lambda: pool.get("decode", new.url).ready, "the new one is ready")
        answers = [(await front.post(CHAT, headers=EXPLAIN)).explain["decode"] for _ in range(6)]
        assert sorted(answers) == sorted([old.url, new.url] * 3), "it gets its share, and no more"
        pool.update("decode", SETTINGS, [Found(new.url)])
        assert {(await front.post(CHAT, headers=EXPLAIN)).explain["decode"] for _ in range(4)} == {new.url}
        text = (await front.get("/metrics")).raw.decode()
        assert new.url in text
        assert f'engine="{old.url}"' not in text, "its series go with it"


async def test_stream_outlives_that_its_engine_leaves_the_pool(redis_url: str) -> None:
    go_on = asyncio.Event()
    async with fleet(redis_url, decode=1) as (front, _, [d]):

        async def halting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            events = d.events(body)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for number, event in enumerate(events):
                await response.write(event)
                if number == 1:
                    await go_on.wait()
            return response

        d.scripts.append(halting)
        answering = asyncio.create_task(front.post(STREAM))
        await until(lambda: d.seen, "it has begun")
        leaving = front.router.pool.get("decode", d.url)
        front.router.pool.update("decode", SETTINGS, [])
        go_on.set()
        answer = await answering
        assert (answer.status, answer.text) == (200, TEXT)
        await until(lambda: leaving.in_flight == 0, "counted down")
        gone = await front.post(CHAT)
        assert (gone.status, gone.headers["Retry-After"]) == (503, "1"), "its model may come back"
        assert (await front.post({**CHAT, "model": "never"})).status in (404, 503)


async def test_crash_is_noticed_without_traffic(redis_url: str) -> None:
    """By the connection that the last look has left, not by the next look."""
    async with fleet(redis_url, probe_interval=2.5) as (front, _, [d, _other]):
        await until(lambda: not front.router.upstream._client.num_busy, "the first look is over")
        await d.stop_listening()
        for transport in [*d.connections, *_transports(front, d)]:
            transport.abort()
        await until(lambda: state(front, d) == "ejected", "it is out of rotation", seconds=1.0)


def _transports(front: Front, engine: StubEngine) -> list[Any]:
    """The router's own connections to it, cut from this end, which the other end notices."""
    kept = front.router.upstream._client._idle
    return [one._transport for origin, all_ in kept.items() if str(origin.port) in engine.url for one in all_]


async def test_engine_that_fails_turn_after_turn_is_left_alone_then_tried_with_one(redis_url: str) -> None:
    async with fleet(redis_url, probe_interval=0.1, retry_share=1.0) as (front, _, [ill, well]):
        ill.scripts.extend(refuse(500) for _ in range(FAULTS_UNTIL_EJECTED))
        answers = await asyncio.gather(*(front.post(CHAT) for _ in range(2 * FAULTS_UNTIL_EJECTED)))
        assert {answer.status for answer in answers} == {200}
        assert state(front, ill) == "ejected"
        seen = len(ill.seen)
        assert {(await front.post(CHAT, headers=EXPLAIN)).explain["decode"] for _ in range(5)} == {well.url}
        assert len(ill.seen) == seen
        await until(lambda: state(front, ill) != "ejected", "it is tried again", seconds=EJECTED_SECONDS + 3)
        await until(lambda: state(front, ill) == "ready", "it is back", seconds=5)


async def test_engine_that_has_too_much_to_do_is_spared(redis_url: str) -> None:
    async with fleet(redis_url) as (front, _, [busy, idle]):
        busy.scripts.append(refuse(503, "too many requests wait", headers={"Retry-After": "5"}))
        answers = [await front.post(CHAT, headers=EXPLAIN) for _ in range(8)]
        assert [answer.status for answer in answers] == [200] * 8
        assert len(busy.seen) == 1
        assert state(front, busy) == "ready", "nothing is wrong with it"
        assert {answer.explain["decode"] for answer in answers[1:]} == {idle.url}


async def test_stream_of_an_engine_that_hangs_ends_with_an_error_event(redis_url: str) -> None:
    async with fleet(redis_url, decode=1, probe_interval=0.05, probe_timeout=0.1) as (front, _, [d]):

        async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in d.events(body)[:3]:
                await response.write(event)
            d.awake.clear()
            await d.awake.wait()
            return response

        d.scripts.append(hang)
        answer = await asyncio.wait_for(front.post(STREAM), 10)
        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == 504
        d.awake.set()


async def test_slow_stream_of_an_engine_that_misses_looks_goes_on(redis_url: str) -> None:
    """Something still comes, so it is not dead."""
    async with fleet(redis_url, decode=1, probe_interval=0.02, probe_timeout=0.05) as (front, _, [d]):

        async def crawl(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            d.awake.clear()
            try:
                events = d.events(body)
                padding = [b": still here\n\n"] * 40
                return await d.play(request, [events[0], *padding, *events[1:]], pause=0.02)
            finally:
                d.awake.set()

        d.scripts.append(crawl)
        answer = await front.post(STREAM)
        assert (answer.status, answer.text) == (200, TEXT)
        assert front.router.pool.get("decode", d.url).looks_missed >= 1 or d.awake.is_set()


async def test_second_prefill_goes_where_the_prompt_is_known(redis_url: str) -> None:
    """D has failed with the blocks in its hands: P computes none of the prompt again, if it is the same P."""
    async with fleet(redis_url) as (front, p, d):
        for engine in d:
            engine.scripts.append(refuse(502))
        front.router.pool.get("decode", d[1].url).last = 5  # the first is chosen
        d[1].scripts.clear()
        answer = await front.post(CHAT, headers=EXPLAIN)
        assert (answer.status, answer.explain["attempts"]) == (200, 2)
        assert sorted(len(one.seen) for one in p) == [0, 2]


async def test_blocks_that_a_full_engine_has_not_taken_go_to_the_next(redis_url: str) -> None:
    async with fleet(redis_url, prefill=1) as (front, [p], [full, other]):
        full.scripts.append(refuse(503, "too many requests wait"))
        answer = await front.post(CHAT, headers=EXPLAIN)
        assert (answer.status, answer.explain["attempts"], answer.explain["decode"]) == (200, 2, other.url)
        assert len(p.seen) == 1
        assert other.bodies[0]["kv_transfer_params"]["remote_request_id"] == "prefill-1"
        assert p.released == []


async def test_first_turns_with_one_system_prompt_share_engines(redis_url: str) -> None:
    async with fleet(redis_url, prefill=3, decode=3) as (front, _, __):
        chosen: dict[str, set[tuple[str, str]]] = {}
        for number in range(6):
            for system in ("You are a pirate.", "You are a monk.", "You are a clerk."):
                messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Hi {number}"}]
                told = (await front.post({**CHAT, "messages": messages}, headers=EXPLAIN)).explain
                chosen.setdefault(system, set()).add((told["prefill"], told["decode"]))
        assert [len(engines) for engines in chosen.values()] == [1, 1, 1]


async def test_no_engine_gets_more_than_its_limit_and_the_rest_waits(redis_url: str) -> None:
    most = dict.fromkeys(("prefill", "decode"), 0)
    now = dict.fromkeys(("prefill", "decode"), 0)
    async with fleet(redis_url, prefill=1, decode=1, prefill_limit=1, decode_limit=3) as (front, [p], [d]):

        def watched(engine: StubEngine) -> Any:
            async def script(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                now[engine.role] += 1
                most[engine.role] = max(most[engine.role], now[engine.role])
                await asyncio.sleep(0.01 if engine is p else 0.05)  # so that several are in their decode leg
                now[engine.role] -= 1
                return web.json_response(engine.whole(body))

            return script

        p.scripts.extend(watched(p) for _ in range(12))
        d.scripts.extend(watched(d) for _ in range(12))
        answers = await asyncio.gather(*(front.post(CHAT) for _ in range(12)))
        assert [answer.status for answer in answers] == [200] * 12
        assert most["prefill"] == 1
        assert 2 <= most["decode"] <= 3
        assert (front.router.decode_gate.num_inside, front.router.prefill_gate.num_inside) == (0, 0)


async def test_full_pool_is_503_with_retry_after_and_keeps_nothing(redis_url: str) -> None:
    go_on = asyncio.Event()
    async with fleet(redis_url, prefill=1, decode=1, decode_limit=1, max_waiting=1) as (front, [p], _):

        async def wait(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return web.json_response(p.whole(body))

        p.scripts.append(wait)
        first = asyncio.create_task(front.post(CHAT))
        await until(lambda: p.seen, "the first is inside")
        second = asyncio.create_task(front.post(CHAT))
        await until(lambda: front.router.decode_gate.num_waiting == 1, "the second waits")
        refused = await front.post(CHAT)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert "decode pool is full" in refused.error["message"]
        assert await front.metric("backhaul_router_turns_waiting", pool="decode") == 1
        go_on.set()
        assert [(await one).status for one in (first, second)] == [200, 200]


async def test_lowest_priority_is_served_first(redis_url: str) -> None:
    go_on = asyncio.Event()
    async with fleet(redis_url, prefill=1, decode=1, decode_limit=1) as (front, [p], _):

        async def wait(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return web.json_response(p.whole(body))

        p.scripts.append(wait)
        tasks = [asyncio.create_task(front.post(CHAT))]
        await until(lambda: p.seen, "the first is inside")
        for number, priority in enumerate((5, 0, -1), start=1):
            tasks.append(asyncio.create_task(front.post({**CHAT, "priority": priority, "user": str(priority)})))
            await until(lambda number=number: front.router.decode_gate.num_waiting == number, "it waits")
        go_on.set()
        await asyncio.gather(*tasks)
        assert [body["max_tokens"] for body in p.bodies] == [1] * 4
        order = [front_body.get("user") for front_body in p.bodies[1:]]
        assert order in (["-1", "0", "5"], [None] * 3)


async def test_retries_end_when_too_many_turns_fail(redis_url: str) -> None:
    async with fleet(redis_url, retry_share=0.0) as (front, p, _):
        for engine in p:
            engine.scripts.extend(refuse(503, "full") for _ in range(500))
        statuses = [(await front.post(CHAT)).status for _ in range(40)]
        assert set(statuses) == {503}
        assert await front.metric("backhaul_router_retries_refused_total", leg="prefill") >= 5
        retries = await front.metric("backhaul_router_retries_total", leg="prefill")
        assert 0 < retries <= 30


async def test_operator_drains_an_engine_and_takes_it_back(redis_url: str) -> None:
    async with fleet(redis_url) as (front, _, [d1, d2]), operator(front) as client:
        answer = await client.post("/admin/drain", json={"engine": d1.url})
        assert (answer.status, (await answer.json())["engines"][0]["state"]) == (200, "draining")
        assert {(await front.post(CHAT, headers=EXPLAIN)).explain["decode"] for _ in range(5)} == {d2.url}
        assert state(front, d1) == "draining"
        assert (await client.post("/admin/drain", json={"engine": d1.url, "drain": False})).status == 200
        assert {(await front.post(CHAT, headers=EXPLAIN)).explain["decode"] for _ in range(5)} == {d1.url, d2.url}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"engine": "http://nowhere:1"}, 404),
        ({"engine": 7}, 400),
        ({}, 400),
        ({"engine": "x", "role": "both"}, 400),
        ({"engine": "x", "drain": "yes"}, 400),
        ([], 400),
    ],
)
async def test_operator_who_asks_for_what_there_is_not_is_told(redis_url: str, body: Any, status: int) -> None:
    async with fleet(redis_url) as (front, _, __), operator(front) as client:
        answer = await client.post("/admin/drain", json=body)
        assert answer.status == status
        assert (await answer.json())["error"]["message"]


async def test_clients_cannot_drain(redis_url: str) -> None:
    async with fleet(redis_url) as (front, _, [d, __]):
        answer = await front.post({"engine": d.url}, path="/admin/drain")
        assert answer.status == 404
        assert state(front, d) == "ready"


@pytest.mark.parametrize("path", ["/admin/status", "/metrics", "/ready", "/health"])
async def test_operators_port_tells_of_the_router(redis_url: str, path: str) -> None:
    async with fleet(redis_url) as (front, _, __), operator(front) as client:
        assert (await client.get(path)).status == 200
        assert (await client.get("/v1/models")).status == 404


# What waits, or is being prefilled, counts; what changes meanwhile is seen.


def holding(engine: StubEngine, go_on: asyncio.Event) -> Any:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response(engine.whole(body))

    return script


def words(text: str, *more: tuple[str, str]) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, *({"role": role, "content": said} for role, said in more)]
    return {"model": "m", "messages": messages}


@pytest.mark.parametrize("how", ["timeout", "client leaves", "abort"])
async def test_offer_of_a_turn_that_gives_up_waiting_stays_for_the_next(redis_url: str, how: str) -> None:
    settings: dict[str, Any] = {"kv_recompute_threshold": 2, "decode_only_tokens": 0, "prefill_limit": 1}
    go_on, conversation = asyncio.Event(), {"conversation_id": f"waits-{how}"}
    queue_timeout = 0.3 if how == "timeout" else 30.0
    async with fleet(redis_url, prefill=1, decode=1, queue_timeout=queue_timeout, **settings) as (front, [p], [d]):
        p.tokenizes = d.tokenizes = True
        first, second = words("one two three four"), words("one two three four", ("assistant", TEXT), ("user", "five"))
        assert (await front.post({**first, **conversation})).status == 200
        p.scripts.append(holding(p, go_on))
        hog = asyncio.create_task(front.post(words("hog")))
        await until(lambda: front.router.prefill_gate.num_inside == 1, "there is no room")
        waiting = asyncio.create_task(front.post({**second, **conversation}, headers={"X-Request-Id": "waits"}))
        await until(lambda: front.router.prefill_gate.num_waiting == 1, "it waits")
        if how == "client leaves":
            waiting.cancel()
        elif how == "abort":
            await front.post({"request_ids": ["waits"]}, path="/inference/v1/abort_requests")
        await until(lambda: front.router.prefill_gate.num_waiting == 0, "it waits no more")
        if how != "client leaves":
            assert (await waiting).status == (503 if how == "timeout" else 409)
        go_on.set()
        await hog
        await until(front.is_settled, "all is settled")
        again = await front.post({**second, **conversation}, headers=EXPLAIN)
        assert (again.status, again.explain["kv"]) == (200, "offered")


async def test_burst_is_spread_over_decode_engines(redis_url: str) -> None:
    go_on = asyncio.Event()
    async with fleet(redis_url, prefill=1) as (front, [p], d):
        p.scripts.extend(holding(p, go_on) for _ in range(20))
        turns = [asyncio.create_task(front.post(CHAT)) for _ in range(20)]
        await until(lambda: len(p.seen) == 20, "all are being prefilled")
        go_on.set()
        assert {(await turn).status for turn in turns} == {200}
        assert [len(one.seen) for one in d] == [10, 10]


async def test_turns_that_wait_are_planned_when_there_is_room(redis_url: str) -> None:
    go_on = asyncio.Event()
    async with fleet(redis_url, prefill_limit=1) as (front, p, _):
        most = 0

        def one(engine: StubEngine) -> Any:
            async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                nonlocal most
                most = max(most, front.router.pool.get("prefill", engine.url).in_flight)
                await go_on.wait()
                return web.json_response(engine.whole(body))

            return script

        for engine in p:
            engine.scripts.extend(one(engine) for _ in range(8))
        turns = [asyncio.create_task(front.post(CHAT)) for _ in range(8)]
        await until(lambda: front.router.prefill_gate.num_waiting == 6, "six wait")
        go_on.set()
        assert {(await turn).status for turn in turns} == {200}
        assert (most, sum(len(one.seen) for one in p)) == (1, 8)


async def test_engine_that_is_drained_while_its_turn_is_prefilled_does_not_get_it(redis_url: str) -> None:
    go_on = asyncio.Event()
    async with fleet(redis_url, prefill=1) as (front, [p], [d1, d2]):
        front.router.pool.get("decode", d2.url).last = 5
        p.scripts.append(holding(p, go_on))
        turn = asyncio.create_task(front.post(CHAT, headers=EXPLAIN))
        await until(lambda: front.router.pool.get("decode", d1.url).expected == 1, "the first is meant to have it")
        front.router.pool.drain(d1.url, None, on=True)
        go_on.set()
        answer = await turn
        assert (answer.status, answer.explain["decode"], answer.explain["attempts"]) == (200, d2.url, 1)
        assert (len(p.seen), d1.seen, p.released) == (1, [], []), "and its blocks go with it"


@pytest.mark.parametrize("how", ["leaves the pool", "refuses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_leg_at_an_engine_that_hangs_ends_whatever_looks_find(redis_url: str, how: str, stream: bool) -> None:
    async with fleet(redis_url, prefill=1, probe_interval=0.05, probe_timeout=0.1) as (front, _, [ill, well]):
        front.router.pool.get("decode", well.url).last = 5
        ill.scripts.append(holding(ill, asyncio.Event()))
        turn = asyncio.create_task(front.post({**CHAT, "stream": stream}, headers=EXPLAIN))
        await until(lambda: ill.seen, "it has the turn")
        if how == "refuses":
            await ill.stop_listening()
            for transport in _transports(front, ill):
                transport.abort()
        else:
            ill.awake.clear()
            front.router.pool.update("decode", SETTINGS, [Found(well.url)])
        answer = await asyncio.wait_for(turn, 10)
        assert (answer.status, answer.explain["decode"]) == (200, well.url)
        ill.awake.set()


async def test_clients_cannot_have_engines_ejected_by_what_is_no_turn(redis_url: str) -> None:
    async with fleet(redis_url, prefill=0) as (front, _, d):
        for engine in d:
            engine.tokenizes = True
            engine.ids = None  # type: ignore[assignment]  # so that it answers 500
        for _ in range(2 * FAULTS_UNTIL_EJECTED):
            assert (await front.post({"model": "m", "prompt": "x"}, path="/tokenize")).status == 500
        assert [state(front, engine) for engine in d] == ["ready", "ready"]


async def test_credentials_in_an_engines_url_are_told_to_nobody(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        p, d = [await stack.enter_async_context(StubEngine(role).running()) for role in ("prefill", "decode")]
        urls = [engine.url.replace("http://", "http://joe:pa55@") for engine in (p, d)]
        front = await stack.enter_async_context(router_over(urls[:1], urls[1:], redis_url))
        answers = [await front.post(CHAT, headers=EXPLAIN), await front.post(STREAM, headers=EXPLAIN)]
        assert answers[0].explain["decode"] == d.url
        told = [str(answer.headers) for answer in answers]
        told += [(await front.get(path)).raw.decode() for path in ("/ready", "/metrics", "/admin/status")]
        told += [str(vars(record)) for record in caplog.records if record.name.startswith("router")]
        assert not [text for text in told if "pa55" in text]

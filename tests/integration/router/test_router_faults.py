"""What goes wrong with engines and clients costs one retry, or is an error to act on; never a wrong answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from redis.asyncio import Redis

from connectors.wire import sse
from tests.router_harness import CHAT, COMPLETION, NOBODY, Front, pretend_ready, router_over, until
from tests.stub_engine import TEXT, Script, StubEngine, hang_up, refuse
from tests.valkey import free_port

STREAM = {**CHAT, "stream": True}
EXPLAIN = {"X-Backhaul-Explain": "1"}


async def disconnect(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    hang_up(request)
    await asyncio.Event().wait()
    raise AssertionError("the connection is gone")


async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nothing ends this wait but the client's leaving")


async def stream_for_json(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(body=sse.DONE_EVENT, content_type="text/event-stream")


def json_text(text: str, content_type: str = "application/json") -> Script:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=text, content_type=content_type)

    return script


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501])
@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_by_prefill_reaches_the_client_and_decode_is_not_asked(
    front: Front, p: StubEngine, d: StubEngine, status: int, stream: bool
) -> None:
    p.scripts.append(refuse(status, "too long", headers={"Retry-After": "7"}))
    answer = await front.post({**CHAT, "stream": stream})
    assert answer.status == status
    assert answer.error == {"message": "too long", "type": "TestError", "param": "p", "code": status}
    assert answer.headers["Retry-After"] == "7"
    assert len(p.seen) == 1
    assert not d.seen


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_by_decode_reaches_the_client(front: Front, p: StubEngine, d: StubEngine, stream: bool) -> None:
    d.scripts.append(refuse(400, "bad parameter"))
    answer = await front.post({**CHAT, "stream": stream})
    assert (answer.status, answer.error["message"]) == (400, "bad parameter")
    assert len(d.seen) == 1


@pytest.mark.parametrize(
    ("text", "content_type", "message"),
    [
        ('{"error": "Unauthorized"}', "application/json", "Unauthorized"),
        ('{"object": "error", "message": "old shape", "code": 400}', "application/json", "old shape"),
        ("<html>nginx</html>", "text/html", "The prefill engine answered with status 400."),
        ("{", "application/json", "The prefill engine answered with status 400."),
        ("[]", "application/json", "The prefill engine answered with status 400."),
        ('{"error": {"message": 5, "code": []}}', "application/json", "The prefill engine answered with status 400."),
    ],
)
async def test_errors_of_any_shape_leave_in_ours(
    front: Front, p: StubEngine, text: str, content_type: str, message: str
) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=400, text=text, content_type=content_type)

    p.scripts.append(script)
    answer = await front.post(CHAT)
    assert (answer.status, answer.error["message"]) == (400, message)
    assert set(answer.error) == {"message", "type", "param", "code"}


@pytest.fixture
async def four(redis_url: str) -> AsyncIterator[tuple[Front, StubEngine, StubEngine, StubEngine, StubEngine]]:
    async with (
        StubEngine("prefill").running() as p1,
        StubEngine("prefill").running() as p2,
        StubEngine("decode").running() as d1,
        StubEngine("decode").running() as d2,
        router_over([p1, p2], [d1, d2], redis_url, first_byte_timeout=1.0, prefill_timeout=1.0) as front,
    ):
        yield front, p1, p2, d1, d2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_seal_that_an_engine_does_not_accept_is_not_the_clients_fault(
    front: Front, p: StubEngine, d: StubEngine, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        told = {"message": "made with another key", "param": "kv_transfer_params", "code": 403}
        return web.json_response({"error": told}, status=403)

    engine = p if role == "prefill" else d
    engine.scripts += [refuses, refuses]
    answer = await front.post(CHAT)
    assert answer.status == 502
    assert answer.error["param"] is None
    record = next(record for record in caplog.records if "seal" in record.message)
    assert record.levelname == "ERROR"
    assert record.__dict__["engine"] == engine.url
    assert record.__dict__["why"] == "made with another key"


FAULTS = [refuse(500), refuse(503), disconnect, never, json_text("{"), json_text("x", "text/plain"), stream_for_json]


@pytest.mark.parametrize("fault", FAULTS)
async def test_prefill_fault_costs_one_retry_elsewhere(four: Any, fault: Script) -> None:
    front, p1, p2, *_ = four
    p1.scripts.append(fault)
    answer = await front.post({**CHAT, "conversation_id": None}, headers=EXPLAIN)
    assert answer.status == 200
    assert (answer.explain["attempts"], answer.explain["prefill"]) == (2, p2.url)
    assert (len(p1.seen), len(p2.seen)) == (1, 1)
    assert await front.metric("backhaul_router_retries_total", leg="prefill") == 1


@pytest.mark.parametrize("fault", [refuse(500), disconnect, never, json_text("", "text/event-stream")])
async def test_decode_fault_costs_one_retry_with_a_new_prefill(four: Any, fault: Script) -> None:
    front, p1, p2, d1, d2 = four
    d1.scripts.append(fault)
    answer = await front.post(STREAM, headers=EXPLAIN)
    assert (answer.status, answer.text) == (200, TEXT)
    assert (answer.explain["attempts"], answer.explain["decode"]) == (2, d2.url)
    first, second = d1.bodies[0]["kv_transfer_params"], d2.bodies[0]["kv_transfer_params"]
    assert (first["remote_port"], first["remote_request_id"]) != (second["remote_port"], second["remote_request_id"])
    assert len(p1.seen) + len(p2.seen) == 2


async def test_error_as_first_event_is_retried_and_else_has_a_status(
    four: Any, front: Front, p: StubEngine, d: StubEngine
) -> None:
    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = sse.event({"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}})
        return await d.play(request, [error, sse.DONE_EVENT])

    front4, _, _, d1, d2 = four
    d1.scripts.append(fail)
    answer = await front4.post(STREAM, headers=EXPLAIN)
    assert (answer.text, answer.explain["decode"]) == (TEXT, d2.url)
    d.scripts.append(fail)
    assert (await front.post(STREAM)).text == TEXT, "prefilled again"
    d.scripts.extend([fail, fail])
    answer = await front.post(STREAM)
    assert (answer.status, answer.error["message"]) == (500, "KV load failed")


async def test_second_fault_is_the_answer(four: Any) -> None:
    front, p1, p2, *_ = four
    p1.scripts.append(refuse(500, "first"))
    p2.scripts.append(refuse(502, "second"))
    answer = await front.post(CHAT)
    assert (answer.status, answer.error["message"]) == (502, "second")


@pytest.mark.parametrize(("fault", "status"), [(refuse(500, "m"), 500), (json_text("{"), 502)])
async def test_fault_of_the_only_engine_is_the_answer(
    front: Front, p: StubEngine, d: StubEngine, fault: Script, status: int
) -> None:
    for engine in (p, d):
        engine.scripts.append(fault)
        if engine is d and status == 500:  # which may have been for the blocks it was given
            engine.scripts.append(fault)
        answer = await front.post(CHAT)
        assert answer.status == status
        assert answer.error["message"]
        assert "http://" not in answer.error["message"]
    assert (await front.post(CHAT)).status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_request_that_kills_engines_meets_two_at_most(redis_url: str, role: str, body: Any) -> None:
    pools = {name: [StubEngine(name) for _ in range(3 if name == role else 1)] for name in ("prefill", "decode")}
    for engine in pools[role]:
        engine.scripts.extend([disconnect] * 3)
    async with (
        _all_running([(engine, 0) for engine in (*pools["prefill"], *pools["decode"])]),
        router_over(pools["prefill"], pools["decode"], redis_url) as front,
    ):
        answer = await front.post(body)
        assert (answer.status, "Retry-After" in answer.headers) == (502, False)
        assert sorted(len(engine.seen) for engine in pools[role]) == [0, 1, 1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_only_engine_that_breaks_off_is_asked_once_more(redis_url: str, role: str) -> None:
    async with (
        StubEngine("prefill", keep_alive=False).running() as p,
        StubEngine("decode", keep_alive=False).running() as d,
        router_over([p], [d], redis_url, probe_interval=60) as front,
    ):
        engine = p if role == "prefill" else d
        engine.scripts.append(disconnect)
        assert (await front.post(CHAT)).status == 200, "only the connection was cut"
        assert len(engine.seen) == 2
        engine.scripts += [disconnect, disconnect, disconnect]
        answer = await front.post(CHAT)
        assert answer.status == 502
        assert answer.error["message"] == f"The {role} engine broke off the connection. Try again."
        assert len(engine.seen) == 4, "what has killed it twice must not do so again"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_connection_closed_as_we_sent_is_made_anew_if_there_is_no_other_engine(
    front: Front, p: StubEngine, d: StubEngine, role: str
) -> None:
    engine = p if role == "prefill" else d
    assert (await front.post(CHAT)).status == 200
    engine.scripts.append(disconnect)
    answer = await front.post(CHAT, headers=EXPLAIN)
    assert (answer.status, answer.explain["attempts"]) == (200, 2)
    engine.scripts.extend([disconnect] * 3)
    answer = await front.post(CHAT)
    assert (answer.status, len(engine.scripts)) == (502, 1)


async def test_only_engine_killed_is_503(d: StubEngine, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(StubEngine("prefill").running())
        front = await stack.enter_async_context(router_over([p], [d], redis_url, probe_interval=60))
        assert (await front.post(CHAT)).status == 200

        async def die(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await p.stop_listening()
            return await disconnect(request, body)

        p.scripts.append(die)
        answer = await front.post(CHAT)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert front.router.pool.get("prefill", p.url).state == "ejected"


async def test_engines_that_shut_down_are_left_at_once(four: Any) -> None:
    """One of each pool at the same time: every leg has its own second attempt."""
    front, p1, p2, d1, d2 = four
    p1.leaving = d1.leaving = True
    answers = await asyncio.gather(*(front.post(STREAM, headers=EXPLAIN) for _ in range(20)))
    assert [answer.status for answer in answers] == [200] * 20
    assert {answer.text for answer in answers} == {TEXT}
    assert {(answer.explain["prefill"], answer.explain["decode"]) for answer in answers} == {(p2.url, d2.url)}
    seen = len(p1.seen), len(d1.seen)
    assert all(seen)
    assert front.router.pool.get("prefill", p1.url).state == "draining"
    assert front.router.pool.get("decode", d1.url).state == "draining"
    assert (await front.post(STREAM)).status == 200
    assert (len(p1.seen), len(d1.seen)) == seen


async def test_unreachable_decode_engine_costs_no_second_prefill(p: StubEngine, redis_url: str) -> None:
    """P's blocks were offered to nobody, so the next decode engine gets them."""
    async with (
        StubEngine("decode").running() as alive,
        router_over([p], [NOBODY, alive], redis_url) as front,
    ):
        pretend_ready(front.router.pool.get("decode", NOBODY), front.router.pool.get("decode", alive.url))
        answer = await front.post(CHAT, headers=EXPLAIN)
        assert (answer.status, answer.explain["attempts"]) == (200, 2)
        assert len(p.seen) == 1
        assert alive.bodies[0]["kv_transfer_params"]["remote_request_id"] == "prefill-1"
        assert not p.released
        assert front.router.pool.get("decode", NOBODY).state == "ejected"


async def test_blocks_held_too_long_are_not_offered(p: StubEngine, redis_url: str) -> None:
    async with (
        StubEngine("decode").running() as alive,
        router_over([p], [NOBODY, alive], redis_url, dispatch_deadline=1e-9) as front,
    ):
        pretend_ready(front.router.pool.get("decode", NOBODY), front.router.pool.get("decode", alive.url))
        assert (await front.post(CHAT)).status == 200
        assert alive.bodies[0]["kv_transfer_params"]["remote_request_id"] == "prefill-2"
        await until(lambda: p.released, "the first blocks are given back")
        assert p.released[0]["request_id"] == "prefill-1"


@pytest.mark.parametrize("missing", ["prefill", "decode", "both"])
async def test_engines_not_up_yet_is_503_until_they_are(redis_url: str, missing: str) -> None:
    ports = {role: free_port() for role in ("prefill", "decode")}
    engines = {role: StubEngine(role) for role in ports}
    late = [role for role in ports if missing in (role, "both")]
    early = [role for role in ports if role not in late]
    urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
    async with (
        _all_running([(engines[role], ports[role]) for role in early]),
        router_over([urls["prefill"]], [urls["decode"]], redis_url, wait=False, probe_interval=0.2) as front,
    ):
        for body in (CHAT, STREAM, COMPLETION):
            answer = await front.post(body)
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert answer.error["type"] == "ServiceUnavailableError"
        assert (await front.get("/ready")).status == 503
        assert (await front.get("/health")).status == 200
        async with _all_running([(engines[role], ports[role]) for role in late]):
            await until(lambda: front.router.ready, "ready")
            assert (await front.get("/ready")).json["ready"] is True
            assert (await front.post(CHAT)).status == 200
        # Gone again: known model, nobody there to serve it.
        await until(lambda: not front.router.ready, "not ready any more")
        answer = await front.post(CHAT)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


@asynccontextmanager
async def _all_running(engines: list[tuple[StubEngine, int]]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for engine, port in engines:
            await stack.enter_async_context(engine.running(port))
        yield


async def test_request_that_finds_the_engine_gone_is_503(redis_url: str, d: StubEngine) -> None:
    async with router_over([NOBODY], [d], redis_url, probe_interval=60) as front:
        gone = front.router.pool.get("prefill", NOBODY)
        pretend_ready(gone, front.router.pool.get("decode", d.url))
        answer = await front.post(CHAT)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert gone.state == "ejected"


@pytest.mark.parametrize("model", [None, "m", "other"])
async def test_model_is_not_denied_before_a_decode_engine_has_listed_any(
    p: StubEngine, redis_url: str, model: str | None
) -> None:
    async with router_over([p], [NOBODY], redis_url) as front:
        answer = await front.post({"messages": CHAT["messages"], "model": model})
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def test_unknown_model_is_404(front: Front, p: StubEngine, d: StubEngine) -> None:
    answer = await front.post({**CHAT, "model": "nobody"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert not p.seen
    assert await front.metric("backhaul_router_turns_total", outcome="rejected") == 1


async def test_prefill_pool_gone_and_decode_may_prefill(d: StubEngine, redis_url: str) -> None:
    async with router_over([NOBODY], [d], redis_url, prefill_fallback="decode") as front:
        answer = await front.post(CHAT, headers=EXPLAIN)
        assert (answer.status, answer.explain["reason"]) == (200, "no_prefill_engine")
        assert "remote_block_ids" not in d.bodies[0]["kv_transfer_params"]


async def test_router_without_prefill_pool(d: StubEngine, redis_url: str) -> None:
    async with router_over([], [d], redis_url) as front:
        assert (await front.get("/ready")).status == 200
        answer = await front.post(STREAM, headers=EXPLAIN)
        assert (answer.text, answer.explain["reason"]) == (TEXT, "no_prefill_pool")


@pytest.mark.parametrize("answer", [refuse(401), json_text("{}"), json_text("["), json_text('{"data": [5]}')])
async def test_engine_that_lists_no_models_is_not_ready(answer: Script, d: StubEngine, redis_url: str) -> None:
    async def models(request: web.Request) -> web.StreamResponse:
        return await answer(request, {})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    odd = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with router_over([odd], [d], redis_url, wait=False) as front:
            await until(lambda: front.router.pool.get("prefill", odd).looks_missed > 1, "it was looked at")
            assert front.router.pool.get("prefill", odd).state == "joining"
            assert (await front.post(CHAT)).status == 503
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("ending", ["abort", "end"])
@pytest.mark.parametrize("num_events", [4, 7], ids=["early", "just before [DONE]"])
async def test_cut_stream_ends_with_an_error_event_and_is_not_remembered(
    front: Front, d: StubEngine, redis_url: str, ending: str, num_events: int
) -> None:
    async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, d.events(body)[:num_events], cut=ending == "abort")

    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
        d.scripts.append(cut)
        answer = await front.post(STREAM)
        assert answer.status == 200
        *before, last = answer.events
        pieces = ["", "Gr", "üß", " dich", " ", "👋", ""]
        assert [event["choices"][0]["delta"]["content"] for event in before] == pieces[:num_events]
        assert last["error"]["code"] == 502
        await until(front.is_idle, "idle")
        assert await redis.keys("*") == []
    assert await front.metric("backhaul_router_turns_total", outcome="cut") == 1
    assert len(d.seen) == 1, "what the client has seen the start of is not made again"


async def test_engines_error_in_mid_stream_is_passed_and_nothing_remembered(
    front: Front, d: StubEngine, redis_url: str
) -> None:
    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = sse.event({"error": {"message": "out of memory", "code": 500}})
        return await d.play(request, [*d.events(body)[:3], error, sse.DONE_EVENT])

    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
        d.scripts.append(fail)
        answer = await front.post(STREAM)
        assert answer.events[-2:] == [{"error": {"message": "out of memory", "code": 500}}, "[DONE]"]
        assert await redis.keys("*") == []
    assert await front.metric("backhaul_router_turns_total", outcome="cut") == 1


async def test_engine_that_falls_silent_ends_the_stream(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async def fall_silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await d.play(request, d.events(body)[:3])
        return await never(request, body)

    async with router_over([p], [d], redis_url, idle_timeout=0.2) as front:
        d.scripts.append(fall_silent)
        answer = await front.post(STREAM)
        assert answer.events[-1]["error"]["code"] == 504
        await until(lambda: d.aborted == 1, "the engine's request is ended too")


async def test_long_stream_is_not_cut_while_it_moves(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, d.events(body), pause=0.1)

    async with router_over([p], [d], redis_url, idle_timeout=0.4, first_byte_timeout=0.4) as front:
        d.scripts.append(slow)
        assert (await front.post(STREAM)).text == TEXT


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_turn_timeout_ends_whatever_hangs(p: StubEngine, d: StubEngine, redis_url: str, body: Any) -> None:
    async with router_over([p], [d], redis_url, turn_timeout=0.3) as front:
        for engine in (p, d):
            engine.scripts.append(never)
            answer = await front.post(body)
            assert (answer.status, answer.error["code"]) == (504, 504)
            await until(lambda engine=engine: engine.aborted == 1, "the engine's request is ended too")  # type: ignore[misc]


async def test_huge_event_ends_the_stream(front: Front, d: StubEngine) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(d.events(body)[0])
        while True:
            await response.write(b"data: " + b"x" * (1 << 20))

    d.scripts.append(endless)
    answer = await front.post(STREAM)
    assert "longer than" in answer.events[-1]["error"]["message"]
    assert len(answer.raw) < 10_000


async def leave(front: Front, when: Any, body: dict[str, Any] = STREAM) -> None:
    """Start a request and close the connection once `when()` is true."""
    request = asyncio.create_task(front.post(body))
    await until(when, "the moment to leave")
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


@pytest.mark.parametrize("body", [CHAT, STREAM, COMPLETION])
async def test_client_leaves_while_prefill_runs(front: Front, p: StubEngine, d: StubEngine, body: Any) -> None:
    p.scripts.append(never)
    await leave(front, lambda: p.seen, body)
    await until(lambda: p.aborted == 1, "prefill is aborted", 1.0)
    await until(front.is_idle, "idle")
    assert not d.seen
    assert await front.metric("backhaul_router_turns_total", outcome="client_gone") == 1


async def test_client_leaves_just_before_prefill_answers(front: Front, p: StubEngine, d: StubEngine) -> None:
    """P has finished and holds its blocks; only its answer says which they are."""

    async def answer_late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await until(lambda: front.router.turns.count == 0, "the client has left")
        await asyncio.sleep(0.05)
        return web.json_response(p.whole(body))

    p.scripts.append(answer_late)
    await leave(front, lambda: p.seen)
    await until(lambda: p.released, "P's blocks are given back", 1.0)
    assert p.released == [{"engine_id": "prefill-engine", "request_id": "prefill-1"}]
    await until(front.is_idle, "idle")
    assert not p.aborted
    assert not d.seen


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_client_leaves_between_prefill_and_decode(front: Front, p: StubEngine, d: StubEngine, body: Any) -> None:
    d.scripts.append(never)
    await leave(front, lambda: d.seen, body)
    await until(lambda: d.aborted == 1, "decode is aborted", 1.0)
    await until(lambda: p.released, "P's blocks are given back", 1.0)
    assert p.released == [{"engine_id": "prefill-engine", "request_id": "prefill-1"}]
    await until(front.is_idle, "idle")
    assert await front.metric("backhaul_router_kv_releases_total", result="ok") == 1


async def test_blocks_of_engines_without_a_release_call_are_left_to_their_lease(
    front: Front, p: StubEngine, d: StubEngine
) -> None:
    p.kv_layout = None
    d.scripts.append(never)
    await leave(front, lambda: d.seen)
    await until(front.is_idle, "idle")
    await front.router.background.settle(1.0)
    assert not p.released


async def test_client_leaves_while_decode_streams(front: Front, p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, d.events(body) * 100, pause=0.01)

    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
        d.scripts.append(slow)
        async with front.client.post(front.url + "/v1/chat/completions", json=STREAM) as answer:
            await answer.content.readany()
            answer.close()
        await until(lambda: d.aborted == 1, "decode is aborted", 1.0)
        await until(front.is_idle, "idle")
        assert await redis.keys("*") == []
    assert not p.released, "the decode engine had taken the blocks over"


async def test_turn_that_fails_leaves_the_conversation_as_it_was(front: Front, d: StubEngine) -> None:
    body = {**CHAT, "conversation_id": "kept"}
    await front.post(body)
    d.scripts.append(refuse(400))
    assert (await front.post(body)).status == 400
    await front.router.background.settle(1.0)
    assert (await front.post(body, headers=EXPLAIN)).explain["turn"] == 2


async def test_disconnects_leave_no_traceback(
    front: Front, p: StubEngine, d: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, d.events(body) * 50, pause=0.005)

    for number in range(50):
        if number % 2:
            p.scripts.append(never)
            await leave(front, lambda number=number: len(p.seen) == number + 1)
        else:
            d.scripts.append(slow)
            async with front.client.post(front.url + "/v1/chat/completions", json=STREAM) as answer:
                await answer.content.readany()
                answer.close()
    await until(front.is_idle, "idle")
    assert [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info] == []
    assert await front.metric("backhaul_router_turns_total", outcome="client_gone") == 50


async def test_client_that_does_not_read_is_let_go_at_the_turns_end(
    p: StubEngine, d: StubEngine, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def torrent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = sse.event({"choices": [{"index": 0, "delta": {"content": "x" * 100_000}}]})
        while True:
            await response.write(event)

    async with router_over([p], [d], redis_url, turn_timeout=1.0) as front:
        d.scripts.append(torrent)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rsplit(":", 1)[1]), limit=1024)
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: d.seen, "the stream has begun")
        await until(front.is_idle, "the turn is over", 5.0)
        await until(lambda: d.aborted == 1, "the engine's request is ended too")
        assert await front.metric("backhaul_router_turns_total", outcome="client_gone") == 1
        writer.close()
        del reader
    assert [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info] == []


async def test_counters_are_exact_after_a_storm(four: Any, caplog: pytest.LogCaptureFixture) -> None:
    front, p1, p2, d1, d2 = four
    chooser = random.Random(7)

    async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return (
            await d1.play(request, d1.events(body)[:2], cut=True)
            if body.get("stream")
            else await disconnect(request, body)
        )

    async def one(number: int) -> None:
        for engine in (p1, p2, d1, d2):
            if chooser.random() < 0.05:
                engine.scripts.append(chooser.choice([refuse(500), refuse(429), disconnect, cut]))
        request = asyncio.create_task(front.post({**CHAT, "stream": number % 2 == 0}))
        if chooser.random() < 0.1:
            await asyncio.sleep(chooser.random() * 0.02)
            request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    async with asyncio.TaskGroup() as tasks:
        for worker in range(8):
            tasks.create_task(_each(one, range(worker * 25, worker * 25 + 25)))
    for engine in (p1, p2, d1, d2):
        engine.scripts.clear()
    await until(front.is_settled, "every counter is back at zero, and nothing is left to release")
    assert [engine.in_flight for engine in front.router.pool.engines] == [0, 0, 0, 0]
    # But for that of a look at an engine, which may be under way.
    await until(lambda: not front.router.upstream._client.num_busy, "no connection to an engine is kept")
    assert [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info] == []
    assert (await front.post(CHAT)).status == 200


async def _each(work: Any, numbers: Any) -> None:
    for number in numbers:
        await work(number)


@pytest.mark.parametrize(("role", "stream"), [("prefill", False), ("decode", False), ("decode", True)])
async def test_turn_does_not_wait_for_an_engine_that_hangs(redis_url: str, role: str, stream: bool) -> None:
    """It takes connections and answers nothing: once probes have told, what waits for it goes elsewhere."""
    async with AsyncExitStack() as stack:
        p1, p2, d1, d2 = [
            await stack.enter_async_context(StubEngine(kind).running())
            for kind in ("prefill", "prefill", "decode", "decode")
        ]
        front = await stack.enter_async_context(
            router_over([p1, p2], [d1, d2], redis_url, probe_interval=0.05, probe_timeout=0.1)
        )
        ill, well = (p1, p2) if role == "prefill" else (d1, d2)
        ill.awake.clear()
        well_dispatched = front.router.pool.get("prefill" if role == "prefill" else "decode", well.url)
        well_dispatched.last += 10  # so that the ill one is chosen
        answer = await asyncio.wait_for(front.post({**CHAT, "stream": stream}, headers=EXPLAIN), 10)
        assert answer.status == 200
        assert (answer.explain["attempts"], answer.explain[role]) == (2, well.url)
        ill.awake.set()
        await until(lambda: front.router.pool.get(ill.role, ill.url).state == "ready", "it is back")


async def test_engine_that_is_told_to_leave_may_finish_what_it_has(front: Front, p: StubEngine, d: StubEngine) -> None:
    leave = asyncio.Event()

    async def finish(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await leave.wait()
        return web.json_response(d.whole(body))

    d.scripts.append(finish)
    answering = asyncio.create_task(front.post(CHAT))
    await until(lambda: d.seen, "the decode leg has arrived")
    front.router.pool.get("decode", d.url).leaves()
    await asyncio.sleep(0)
    leave.set()
    assert (await answering).status == 200


@pytest.mark.parametrize("error", ['{"error": 503}', '{"error": true}', '{"error": ["busy"]}', '{"detail": {"a": 1}}'])
async def test_error_in_a_shape_nobody_knows_keeps_its_status(front: Front, p: StubEngine, error: str) -> None:
    async def odd(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=error, status=422, content_type="application/json")

    p.scripts.append(odd)
    answer = await front.post(CHAT)
    assert answer.status == 422
    assert isinstance(answer.error["message"], str)


async def test_turn_ends_with_its_deadline(redis_url: str, p: StubEngine, d: StubEngine) -> None:
    """What is over is not tried again, and the engines are not blamed for it."""

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with router_over([p], [d], redis_url, turn_timeout=0.5) as front:
        d.scripts.append(slow)
        answer = await front.post(CHAT)
        assert (answer.status, answer.error["message"]) == (504, "The decode engine did not answer in time. Try again.")
        assert (len(p.seen), len(d.seen)) == (1, 1)

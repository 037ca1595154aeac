"""GET /admin/status of a running router, and the settings that state what engines can do."""

from __future__ import annotations

from tests.router_harness import NOBODY, router_over, until
from tests.stub_engine import StubEngine

NO_REDIS = "redis://127.0.0.1:1/0"


async def test_status_tells_engines_and_what_they_can_do() -> None:
    async with (
        StubEngine("prefill").running() as p,
        StubEngine("decode", owned_by="vllm").running() as d,
        router_over([p], [d], NO_REDIS, engines={d.url: {"kind": "vllm", "block_size": 32}}) as front,
    ):
        answer = await front.get("/admin/status")
        assert answer.status == 200
        assert answer.headers["Cache-Control"] == "no-store"
        status = answer.json
    assert (status["ready"], status["draining"], status["turns_in_flight"]) == (True, False, 0)
    prefill, decode = status["engines"]
    assert (prefill["url"], prefill["role"], prefill["state"], prefill["models"]) == (p.url, "prefill", "ready", ["m"])
    assert prefill["capabilities"]["kind"] == {"value": "backhaul", "source": "seen"}
    assert prefill["capabilities"]["release"] == {"value": True, "source": "seen"}
    assert decode["capabilities"]["block_size"] == {"value": 32, "source": "stated"}
    assert {lack["capability"] for lack in decode["lowers"]} >= {"seal"}
    assert status["turns"] == dict.fromkeys(("client_gone", "cut", "failed", "ok", "rejected"), 0)


async def test_status_shows_no_password_of_an_engines_address() -> None:
    secret = NOBODY.replace("http://", "http://user:s3cret@")
    async with router_over([], [secret], NO_REDIS, wait=False) as front:
        await until(lambda: front.router.pool.decode[0].state == "ejected", "down")
        answer = await front.get("/admin/status")
    assert answer.json["engines"][0]["url"] == NOBODY
    assert b"s3cret" not in answer.raw


async def test_status_can_be_switched_off() -> None:
    async with (
        StubEngine("decode").running() as d,
        router_over([], [d], NO_REDIS, status=False) as front,
    ):
        assert (await front.get("/admin/status")).status == 404
        assert (await front.get("/health")).status == 200


async def test_engines_that_cannot_exchange_kv_are_not_paired() -> None:
    async with (
        StubEngine("prefill", owned_by="vllm").running() as p,
        StubEngine("decode").running() as d,
        router_over([p], [d], NO_REDIS) as front,
    ):
        answer = await front.post({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
        assert answer.status == 200
        assert await front.metric("backhaul_router_plans_total", reason="no_compatible_prefill") == 1
    assert p.seen == []
    assert len(d.seen) == 1

"""GET /admin/status of a running router, and the settings that state what engines can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from connectors.wire.openai import unavailable
from router.admin import MAX_BODY_BYTES
from router.names import MAX_CHARS
from router.page import FILES
from tests.router_harness import CHAT, NOBODY, Front, operator, router_over, until
from tests.router_process import listening, started
from tests.stub_engine import StubEngine
from tests.valkey import free_port

NO_REDIS = "redis://127.0.0.1:1/0"


async def status_for(front: Front) -> dict[str, Any]:
    async with operator(front) as client:
        told: dict[str, Any] = await (await client.get("/admin/status")).json()
    return told


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


async def test_operators_are_told_of_recent_turns_and_clients_are_not(redis_url: str) -> None:
    async with (
        StubEngine("prefill").running() as p,
        StubEngine("decode").running() as d,
        router_over([p], [d], redis_url) as front,
    ):
        headers = {"X-Request-Id": "their-request", "X-Conversation-Id": "their-name", "Authorization": "Bearer theirs"}
        assert (await front.post(CHAT, headers=headers)).status == 200
        assert (await front.post({**CHAT, "stream": True})).status == 200
        assert (await front.post({**CHAT, "model": "made up by a client"})).status == 404
        status = await status_for(front)
        for_clients = (await front.get("/admin/status")).json
    assert "recent" not in for_clients
    assert set(status) == {*for_clients, "recent"}
    refused, streamed, whole = status["recent"]["turns"]
    assert (refused["outcome"], refused["status"], refused["model"]) == ("rejected", 404, None)
    assert streamed["first_byte_ms"] > 0
    assert whole["first_byte_ms"] is None
    assert (whole["endpoint"], whole["model"], whole["plan"], whole["kv"]) == ("chat", "m", "new", "no_record")
    assert (whole["prefill"], whole["decode"]) == (p.url, d.url)
    assert list(whole["phases_ms"]) == ["read", "recall", "prefill", "decode", "remember"]
    tokens = {source: n for bucket in status["recent"]["buckets"] for source, n in bucket["tokens"].items()}
    assert sum(tokens.values()) >= whole["tokens"]["prompt"] > 0
    text = str(status)
    assert not any(one in text for one in ("their-request", "their-name", "theirs", "made up", "Hi"))


async def test_redis_is_asked_whenever_somebody_looks(redis_url: str) -> None:
    async with (
        StubEngine("decode").running() as d,
        router_over([], [d], redis_url) as front,
        router_over([], [d], NO_REDIS) as without,
    ):
        redis = (await status_for(front))["redis"]
        assert (redis["state"], redis["pending"]) == ("ok", 0)
        assert 0 < redis["latency_ms"]["p50"] <= redis["latency_ms"]["p99"]
        redis = (await status_for(without))["redis"]
        assert (redis["state"], redis["why"]) == ("silent", "ConnectionError")


async def test_engines_are_asked_how_busy_they_are_once_somebody_looks() -> None:
    """Where there is a choice they are asked in any case."""
    async with (
        StubEngine("decode").running() as d,
        router_over([], [d], NO_REDIS, probe_interval=0.05) as front,
    ):
        (engine,) = front.router.pool.engines
        assert (await status_for(front))["engines"][0]["load"] is None
        engine.reported = engine.reported.__class__(running=2, waiting=1, kv_use=0.25, is_told=True, leases=3)
        front.router.pool.observed_until = 0.0
        told = (await status_for(front))["engines"][0]
        assert told["load"] == {
            "running": 2,
            "waiting": 1,
            "kv_use": 0.25,
            "leases": 3,
            "blocks_pinned": 0,
            "blocks_idle": 0,
        }
        await until(lambda: not engine.reported.is_told, "it is asked, and says nothing")


async def test_state_of_an_engine_has_a_reason_and_a_time() -> None:
    async with StubEngine("decode").running() as d, router_over([], [d], NO_REDIS) as front:
        before = (await status_for(front))["engines"][0]
        front.router.pool.drain(d.url, None, on=True)
        after = (await status_for(front))["engines"][0]
    assert (before["state"], before["why"]) == ("ready", "lists m")
    assert (after["state"], after["why"]) == ("draining", "an operator says so")
    assert before["since"] <= after["since"] <= before["since"] + 60


@pytest.mark.parametrize("path", FILES)
async def test_files_of_the_page_let_nothing_else_in(path: str) -> None:
    async with (
        StubEngine("decode").running() as d,
        router_over([], [d], NO_REDIS) as front,
        operator(front) as client,
    ):
        answer = await client.get(path)
        assert answer.status == 200
        assert len(await answer.read()) > 100
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert (await front.get(path)).status == 404  # not for clients


async def test_pages_from_elsewhere_cannot_drain() -> None:
    """Whether or not the browser takes this for a safe place, of which it would say more than the origin."""
    async with (
        StubEngine("decode").running() as d,
        router_over([], [d], NO_REDIS) as front,
        operator(front) as client,
    ):

        async def drain(**headers: str) -> int:
            answer = await client.post("/admin/drain", data=f'{{"engine": "{d.url}"}}', headers={"Host": own} | headers)
            return answer.status

        own = "127.0.0.1:9000"
        for origin in (
            "http://elsewhere.example",
            "null",
            "http://127.0.0.1:1",
            f"http://{own}.elsewhere.example",
        ):
            assert await drain(Origin=origin) == 403, origin
        assert front.router.pool.decode[0].state == "ready"
        assert await drain(Origin=f"http://{own}") == 200
        assert await drain() == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("127.0.0.1:9000", "[::1]:9000", "10.0.0.7", "localhost:9000", "router")),
        *((host, 200) for host in ("ops.example", "OPS.example:443")),
        *((host, 403) for host in ("elsewhere.example:9000", "127.0.0.1.elsewhere.example", "ops.example.org", "[")),
    ],
)
async def test_names_that_others_may_own_are_not_answered(host: str, status: int) -> None:
    """Such as one that a page from elsewhere has made to mean this machine."""
    async with (
        StubEngine("decode").running() as d,
        router_over([], [d], NO_REDIS, admin_names=("ops.example",)) as front,
        operator(front) as client,
    ):
        for path in ("/", "/admin/status"):
            assert (await client.get(path, headers={"Host": host})).status == status
        drain = {"engine": d.url, "drain": False}
        assert (await client.post("/admin/drain", json=drain, headers={"Host": host})).status == status
        for path in ("/health", "/metrics"):  # for whom a name says nothing
            assert (await client.get(path, headers={"Host": host})).status == 200


async def test_operators_get_heads_and_the_limit_that_holds_for_them() -> None:
    async with (
        StubEngine("decode").running() as d,
        router_over([], [d], NO_REDIS) as front,
        operator(front) as client,
    ):
        for path in ("/", "/metrics", "/admin/status"):
            assert (await client.head(path)).status == 200
        answer = await client.post("/admin/drain", data=b"x" * (MAX_BODY_BYTES + 1))
        assert answer.status == 413
        assert f"larger than {MAX_BODY_BYTES} bytes" in (await answer.json())["error"]["message"]


async def test_process_tells_its_own_status_where_nobody_asks_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gather(*_: object) -> list[bytes]:
        raise unavailable("The router's processes do not answer.")

    async with StubEngine("decode").running() as d, router_over([], [d], NO_REDIS) as front:
        monkeypatch.setattr(front.router.siblings, "gather", gather)
        assert (await front.get("/admin/status")).json["processes"] == 1


async def test_names_of_models_are_told_and_counted_in_bounds() -> None:
    class Wordy(StubEngine):
        async def _models(self, _: web.Request) -> web.Response:
            names = ["n" * 10_000, 'with "quotes"\nand lines', *map(str, range(1000))]
            return web.json_response({"data": [{"id": name, "owned_by": "backhaul"} for name in names]})

    async with (
        Wordy("decode").running() as d,
        router_over([], [d], NO_REDIS) as front,
        operator(front) as client,
    ):
        for name in ("n" * 10_000, 'with "quotes"\nand lines'):
            assert (await front.post({**CHAT, "model": name, "stream": True})).status == 200
        families = list(text_string_to_metric_families((await front.get("/metrics")).raw.decode()))
        status = await client.get("/admin/status")
        assert len(await status.read()) < 20_000
        assert (await status.json())["engines"][0]["why"].endswith(" and 997 more")
        assert len((await front.get("/ready")).raw) < 5_000
    labels = {one.labels["model"] for family in families for one in family.samples if "model" in one.labels}
    assert {len(label) for label in labels} == {MAX_CHARS, len('with "quotes"\nand lines')}


async def test_any_of_several_processes_tells_for_all(tmp_path: Path) -> None:
    port = free_port()
    async with (
        StubEngine("decode").running() as d,
        started(tmp_path, decode=[d.url], processes=2, admin_port=port) as router,
    ):
        await listening(router, tmp_path)
        for _ in range(6):  # each on a connection of its own, which either process may get
            headers = {"Connection": "close"}
            async with router.client.post(f"{router.url}/v1/chat/completions", json=CHAT, headers=headers) as answer:
                assert answer.status == 200
        async with router.client.get(f"http://127.0.0.1:{port}/admin/status") as answer:
            status = await answer.json()
    assert status["processes"] == 2
    assert status["ready"]
    assert status["turns"]["ok"] == len(status["recent"]["turns"]) == 6
    assert sum(bucket["turns"] for bucket in status["recent"]["buckets"]) == 6
    assert [engine["url"] for engine in status["engines"]] == [d.url]

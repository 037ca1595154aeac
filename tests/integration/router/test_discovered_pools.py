"""Pools that are pods of Kubernetes, under turns."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from tests.kube_stub import PODS, KubeStub, Object, pod
from tests.router_harness import CHAT, Front, router_over, until
from tests.stub_engine import TEXT, StubEngine

STREAM: dict[str, Any] = {**CHAT, "stream": True}
EXPLAIN = {"X-Backhaul-Explain": "1"}
POOLS = [f"pods://serving?labels=app=engine,role={role}&port=http" for role in ("prefill", "decode")]


def engine_pod(name: str, engine: StubEngine, **more: Any) -> Object:
    port = int(engine.url.rsplit(":", 1)[1])
    containers = [{"name": "engine", "ports": [{"name": "http", "containerPort": port}]}]
    labels = {"app": "engine", "role": engine.role}
    return pod(name, "127.0.0.1", containers=containers, **({"labels": labels} | more))


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeStub]:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    async with KubeStub(tmp_path, tls=context).running() as kube:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", kube.url.rsplit(":", 1)[1])
        yield kube


@asynccontextmanager
async def cluster(
    kube: KubeStub, redis_url: str, tmp_path: Path, *, wait: bool = True
) -> AsyncIterator[tuple[Front, StubEngine, list[StubEngine]]]:
    """A prefill and two decode engines, as pods, and a router that finds them."""
    async with AsyncExitStack() as stack:
        p, d1, d2 = [
            await stack.enter_async_context(StubEngine(role).running()) for role in ("prefill", "decode", "decode")
        ]
        for name, engine in (("p", p), ("d1", d1), ("d2", d2)):
            kube.put(PODS, engine_pod(name, engine))
        front = await stack.enter_async_context(
            router_over(POOLS[:1], POOLS[1:], redis_url, service_account=tmp_path, wait=False)
        )
        if wait:
            await until(lambda: sum(one.ready for one in front.router.pool.engines) == 3, "all are found and ready")
        yield front, p, [d1, d2]


async def decoders(front: Front, number: int = 6) -> set[str]:
    answers = [await front.post(CHAT, headers=EXPLAIN) for _ in range(number)]
    assert {answer.status for answer in answers} == {200}
    return {answer.explain["decode"] for answer in answers}


async def test_terminating_pod_gets_no_new_turn_and_finishes_its_streams(
    kube: KubeStub, redis_url: str, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    async with cluster(kube, redis_url, tmp_path) as (front, _, [d1, d2]):
        assert await decoders(front) == {d1.url, d2.url}

        async def halting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in d1.events(body):
                await response.write(event)
                await go_on.wait()
            return response

        front.router.pool.get("decode", d2.url).last += 5
        d1.scripts.append(halting)
        seen = len(d1.seen)
        streaming = asyncio.create_task(front.post(STREAM))
        await until(lambda: len(d1.seen) > seen, "the stream has begun")
        kube.put(PODS, engine_pod("d1", d1, deleting=True))
        await until(lambda: front.router.pool.get("decode", d1.url).state == "draining", "noticed", seconds=1.0)
        assert await decoders(front) == {d2.url}
        kube.delete(PODS, "d1")
        await until(lambda: len(front.router.pool.decode) == 1, "it is gone")
        go_on.set()
        answer = await streaming
        assert (answer.status, answer.text) == (200, TEXT)
        assert d1.url not in (await front.get("/metrics")).raw.decode()


@pytest.mark.parametrize("how", ["not ready", "evicted", "relabelled"])
async def test_pod_that_no_longer_counts_is_left_and_comes_back(
    kube: KubeStub, redis_url: str, tmp_path: Path, how: str
) -> None:
    async with cluster(kube, redis_url, tmp_path) as (front, _, [d1, d2]):
        changed = {
            "not ready": engine_pod("d1", d1, ready=False),
            "evicted": engine_pod("d1", d1, phase="Failed") | {"status": {"phase": "Failed", "reason": "Evicted"}},
            "relabelled": engine_pod("d1", d1, labels={"app": "engine", "role": "none"}),
        }[how]
        kube.put(PODS, changed)
        await until(lambda: len(front.router.pool.decode) == 1, "it is left", seconds=1.0)
        assert await decoders(front) == {d2.url}
        async with StubEngine("decode").running() as elsewhere:
            kube.put(PODS, engine_pod("d1", elsewhere))
            await until(lambda: sum(one.ready for one in front.router.pool.decode) == 2, "it is back")
            assert await decoders(front) == {elsewhere.url, d2.url}


async def test_scaled_to_zero_is_503_for_its_model_and_404_for_others(
    kube: KubeStub, redis_url: str, tmp_path: Path
) -> None:
    async with cluster(kube, redis_url, tmp_path) as (front, _, __):
        for name in ("d1", "d2"):
            kube.delete(PODS, name)
        await until(lambda: not front.router.pool.decode, "they are gone")
        answer = await front.post(CHAT)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await front.get("/ready")).status == 503


async def test_turns_go_on_while_the_api_server_is_away(kube: KubeStub, redis_url: str, tmp_path: Path) -> None:
    async with cluster(kube, redis_url, tmp_path) as (front, _, [d1, d2]):
        kube.refuse = {"list": 500, "watch": 500}
        kube.drop()
        await kube.has_been_asked("list pods", 4)
        assert await decoders(front) == {d1.url, d2.url}
        kube.refuse = {}
        kube.delete(PODS, "d1")
        await until(lambda: len(front.router.pool.decode) == 1, "what was missed is made up for")


async def test_twenty_starts_with_engines_there_already(
    kube: KubeStub, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not ready until the first list is there; then the first request is answered."""
    async with cluster(kube, redis_url, tmp_path):
        for _ in range(20):
            async with router_over(POOLS[:1], POOLS[1:], redis_url, service_account=tmp_path, wait=False) as front:
                early = await front.post(CHAT)
                assert early.status in (200, 503)
                await until(lambda front=front: front.router.ready, "it is ready")  # type: ignore[misc]
                assert (await front.get("/ready")).status == 200
                assert (await front.post(CHAT)).status == 200
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []

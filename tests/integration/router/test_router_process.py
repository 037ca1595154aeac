"""The router as a process: starting, being told to stop, and stopping."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.router_harness import CHAT, until
from tests.router_process import listening, started
from tests.stub_engine import StubEngine


async def test_sigterm_lets_streams_end(p: StubEngine, d: StubEngine, tmp_path: Path) -> None:
    release = asyncio.Event()

    async def held(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, *rest = d.events(body)
        await response.write(first)
        await release.wait()
        await response.write(b"".join(rest))
        return response

    async with started(tmp_path, prefill=[p.url], decode=[d.url], drain_delay=1.0) as router:
        await listening(router, tmp_path)
        d.scripts.extend([held] * 20)
        streams = [asyncio.create_task(router.stream()) for _ in range(20)]
        await until(lambda: len(d.seen) == 20, "all streams run")
        router.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 1.0
        while await router.ready() != 503:
            assert time.monotonic() < deadline
        async with router.client.get(router.url + "/health") as answer:
            assert answer.status == 200
        async with router.client.post(router.url + "/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200, "still served while load balancers notice"
            assert answer.headers["Connection"] == "close"
        await until(lambda: _refused(router.url), "no new connections are taken", 5)
        assert router.process.returncode is None
        release.set()
        for text in await asyncio.gather(*streams):
            assert "[DONE]" in text
            assert "error" not in text
        assert await router.end(5) == 0


def _refused(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


async def test_second_signal_cuts_short(p: StubEngine, d: StubEngine, tmp_path: Path) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, d.events(body)[:2] * 1000, pause=0.05)

    async with started(tmp_path, prefill=[p.url], decode=[d.url], drain_delay=60) as router:
        await listening(router, tmp_path)
        d.scripts.append(endless)
        stream = asyncio.create_task(router.stream())
        await until(lambda: d.seen, "the stream runs")
        for _ in range(3):
            router.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
        assert await router.end(5) == 0
        await asyncio.gather(stream, return_exceptions=True)
        await until(lambda: d.aborted == 1, "the engine's request is ended")


async def test_streams_that_do_not_end_are_cut_after_the_drain_timeout(
    p: StubEngine, d: StubEngine, tmp_path: Path
) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, d.events(body)[:2] * 1000, pause=0.05)

    async with started(tmp_path, prefill=[p.url], decode=[d.url], drain_delay=0, drain_timeout=0.3) as router:
        await listening(router, tmp_path)
        d.scripts.append(endless)
        stream = asyncio.create_task(router.stream())
        await until(lambda: d.seen, "the stream runs")
        router.process.send_signal(signal.SIGTERM)
        assert await router.end(5) == 0
        await asyncio.gather(stream, return_exceptions=True)


async def test_interrupt_does_not_wait_for_load_balancers(d: StubEngine, tmp_path: Path) -> None:
    async with started(tmp_path, decode=[d.url], drain_delay=60) as router:
        await listening(router, tmp_path)
        router.process.send_signal(signal.SIGINT)
        assert await router.end(3) == 0


@pytest.mark.parametrize("delay", [0.0, 0.3, 0.6])
async def test_signal_while_starting(d: StubEngine, tmp_path: Path, delay: float) -> None:
    async with started(tmp_path, decode=[d.url], drain_delay=0) as router:
        await asyncio.sleep(delay)
        router.process.send_signal(signal.SIGTERM)
        assert await router.end(3) in (0, -signal.SIGTERM)


async def test_port_taken_is_one_line(d: StubEngine, tmp_path: Path) -> None:
    taken = int(d.url.rsplit(":", 1)[1])
    async with started(tmp_path, decode=[d.url], port=taken) as router:
        _, errors = await asyncio.wait_for(router.process.communicate(), 20)
        assert router.process.returncode == 1
        lines = errors.decode().splitlines()
        assert f"cannot listen on 127.0.0.1:{taken}" in lines[-1]
        assert "--port" in lines[-1]
        assert "Traceback" not in errors.decode()
        assert not (tmp_path / "router.json").exists()


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_source_that_can_never_be_asked_is_one_line(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with started(tmp_path, decode=["pods://llm?labels=role=decode&port=http"], processes=processes) as router:
        _, errors = await asyncio.wait_for(router.process.communicate(), 20)
        assert router.process.returncode == 1
        assert "the router does not run in Kubernetes" in errors.decode()
        assert "Traceback" not in errors.decode()


async def test_restarts_over_running_engines_serve_their_first_request(
    p: StubEngine, d: StubEngine, tmp_path: Path
) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with started(folder, prefill=[p.url], decode=[d.url], drain_delay=0) as router:
            await listening(router, folder)
            assert "👋" in await router.stream()
            router.process.send_signal(signal.SIGTERM)
            assert await router.end(3) == 0
            assert router.process.stderr is not None
            assert b"Traceback" not in await router.process.stderr.read()

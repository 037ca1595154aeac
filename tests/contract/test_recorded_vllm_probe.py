"""What the router finds out about an engine that answers as vLLM 0.32 has answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from router.client import Client
from router.discovery.source import Found
from router.known import Known
from router.pool import Pool
from router.watch import Watch
from tests.contract.recorded import BLOCK_SIZE, MODEL, recorded, replay

FILES = ("version", "models", "probe_tokenize", "probe_release", "probe_generate", "probe_generate_empty")


@asynccontextmanager
async def vllm(metrics: str) -> AsyncIterator[str]:
    """The URL of one that answers each recorded question."""
    answers = {}
    for name in (*FILES, metrics):
        asked = recorded(name)["request"]
        answers[asked["method"], asked["path"]] = replay(name)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await answers[request.method, request.path](request, {})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def found(metrics: str) -> Known:
    async with vllm(metrics) as url, Client(2.0) as client:
        pool = Pool(["prefill"])
        pool.update("prefill", "test", [Found(url)])
        watch = Watch(pool, client, interval=60.0, timeout=5.0)
        (engine,) = pool.engines
        await watch.look(engine)
        assert engine.state == "ready"
        assert set(engine.models) == {MODEL}
        return engine.known


@pytest.mark.parametrize("metrics", ["metrics_prefill", "metrics_decode"])
async def test_all_that_vllm_tells_is_understood(metrics: str) -> None:
    now = (await found(metrics)).now
    assert (now.kind, now.version, now.block_size, now.cache_dtype) == ("vllm", "0.32.0", BLOCK_SIZE, "auto")
    assert (now.tokenize, now.release, now.scale_out) == (True, False, False)
    assert (now.return_token_ids, now.streams_carry_params) == (True, False)
    assert now.num_blocks is not None

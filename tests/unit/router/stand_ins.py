"""Servers that answer a router's questions as engines of several kinds do, and as none should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from aiohttp import web

from router.client import Client
from router.discovery.source import Found
from router.member import Engine
from router.pool import Pool
from router.statement import EngineStatement
from router.watch import Watch

METRICS = """\
# HELP vllm:nixl_bytes_transferred Histogram
vllm:nixl_bytes_transferred_count{{engine="0",model_name="m"}} {pulls}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block_size}",cache_dtype="auto",engine="0",num_gpu_blocks="728"}} 1.0
vllm:other 1.0
"""


@dataclass
class StandIn:
    """One engine, with the routes of vLLM 0.32."""

    owned_by: str | None = "vllm"
    version: str = "0.32.0"
    block_size: object = 32
    pulls: str = "0.0"
    api_key: str | None = None
    scale_out: int = 403
    """How generate answers a body that is empty."""
    models: tuple[str, ...] = ("m",)
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.cards),
            web.get("/version", self.tell_version),
            web.get("/metrics", self.metrics),
            web.post("/tokenize", self.refuse),
            web.post("/inference/v1/generate", self.refuse),
        ]

    async def cards(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        data = [{"id": name, "owned_by": self.owned_by, "max_model_len": 4096} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def tell_version(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"version": self.version})

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=METRICS.format(pulls=self.pulls, block_size=self.block_size))

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=self.scale_out)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StandIn]:
        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            self.asked.append(f"{request.method} {request.path}")
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(middlewares=[note])
        app.add_routes(self.routes())
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


@dataclass
class OurStandIn(StandIn):
    owned_by: str | None = "backhaul"
    version: str = "0.1.0"
    scale_out: int = 400
    agent: dict[str, Any] = field(
        default_factory=lambda: {"engine_id": "e-1", "kv_layout": "layout-1", "num_blocks": 512, "memory": "DRAM"}
    )

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.post("/kv/release", self.refuse),
            web.get("/kv/agent", self.tell_agent),
        ]

    async def tell_agent(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(self.agent)


@dataclass
class BareStandIn(StandIn):
    """It lists models, and has none of the other routes."""

    owned_by: str | None = "somebody"

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/models", self.cards)]


@dataclass
class HostileStandIn(StandIn):
    """It lists its models, and answers everything else in a bad way."""

    manner: str = "huge"
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/models", self.cards), web.route("*", "/{rest:.*}", self.misbehave)]

    async def misbehave(self, request: web.Request) -> web.StreamResponse:
        if self.manner == "slow":
            await self.done.wait()
        if self.manner == "garbage":
            return web.Response(body=b'\xff{"version": [1e999, "\x1b[31m' * 7, content_type="application/json")
        if self.manner == "wrong types":
            body = {"version": {"a": 1}, "engine_id": 7, "kv_layout": ["x"], "num_blocks": True}
            return web.json_response(body)
        if self.manner == "hangs up":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        response = web.StreamResponse()
        await response.prepare(request)
        line = b"vllm:cache_config_info{" + b'a="b",' * 10_000
        try:
            while True:
                await response.write(line)
        except ConnectionResetError:
            return response


@asynccontextmanager
async def looked_at(
    *engines: StandIn, seconds: float = 5.0, stated: Mapping[str, EngineStatement] = MappingProxyType({})
) -> AsyncIterator[tuple[Watch, list[Engine]]]:
    """Each of these prefill engines looked at once, and none watched."""
    async with Client(2.0) as client:
        pool = Pool(["prefill"], stated=stated)
        watch = Watch(pool, client, interval=60.0, timeout=seconds)
        pool.update("prefill", "test", [Found(engine.url) for engine in engines])
        for engine in pool.engines:
            await watch.look(engine)
        yield watch, list(pool.prefill)

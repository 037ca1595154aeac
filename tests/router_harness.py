"""A real router on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
from aiohttp import web

from connectors.wire import sse
from router.app import clients_runner, open_router, operators_runner
from router.config import RouterConfig
from router.context import Router
from router.member import Engine
from tests.stub_engine import StubEngine

NOBODY = "http://127.0.0.1:1"
"""Nothing listens there."""

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}


async def until(condition: Callable[[], object], what: str, seconds: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)


def pretend_ready(engine: Engine, like: Engine) -> None:
    """Have the router believe that an engine is up, such as another, and longer idle."""
    engine.models, engine.known = like.models, like.known
    engine.turn_to("ready", "a test says so")
    like.last = engine.last + 1


@dataclass
class Answer:
    status: int
    headers: Any
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])

    @property
    def text_of_whole(self) -> str:
        """Of an answer in one piece."""
        choice = self.json["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def explain(self) -> dict[str, Any]:
        """What the headers say that X-Backhaul-Explain asks for; `plan` as `reason` and `kv`."""
        told: dict[str, Any] = {
            name.lower().removeprefix("x-backhaul-").replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in self.headers.items()
            if name.lower().startswith("x-backhaul-")
        }
        told["reason"], _, told["kv"] = told.pop("plan").partition("; kv=")
        return told

    @property
    def events(self) -> list[Any]:
        data = [event.data for event in sse.SSEParser().feed(self.raw) if event.data is not None]
        return [text.decode() if text == sse.DONE else json.loads(text) for text in data]

    @property
    def text(self) -> str:
        choices = [event["choices"][0] for event in self.events if isinstance(event, dict) and event.get("choices")]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@dataclass
class Front:
    url: str
    router: Router
    client: aiohttp.ClientSession

    async def post(self, body: Any, *, path: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        """One request, read to its end. A dictionary's endpoint goes by its content."""
        if not path:
            path = "/v1/completions" if isinstance(body, dict) and "prompt" in body else "/v1/chat/completions"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=BytesIO(data), headers=headers) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def get(self, path: str) -> Answer:
        async with self.client.get(self.url + path) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        total = 0.0
        for line in (await self.get("/metrics")).raw.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.split("{")[0] == name and all(f'{key}="{text}"' in sample for key, text in labels.items()):
                total += float(value)
        return total

    def is_settled(self) -> bool:
        """Whether turns have ended, and what they left to be done is done."""
        return self.is_idle() and self.router.background.is_idle and not self.router.store.num_pending

    def is_idle(self) -> bool:
        return not self.router.turns.count and not any(engine.in_flight for engine in self.router.pool.engines)


@asynccontextmanager
async def router_over(
    prefill: Sequence[StubEngine | str],
    decode: Sequence[StubEngine | str],
    redis: str,
    *,
    wait: bool = True,
    **settings: Any,
) -> AsyncIterator[Front]:
    """A router over these engines, ready unless `wait` is false. Leaves no turn behind, or fails."""

    def urls(engines: Sequence[StubEngine | str]) -> tuple[str, ...]:
        return tuple(engine if isinstance(engine, str) else engine.url for engine in engines)

    settings.setdefault("redis_timeout", 2.0)  # the machine that runs the tests may be busy
    settings.setdefault("outage_wait", 0.0)  # what nobody can serve is to fail at once, unless a test is about it
    config = RouterConfig(port=0, prefill=urls(prefill), decode=urls(decode), redis=redis, **settings)
    async with open_router(config) as router, listening(clients_runner(router)) as url:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=30)
        ) as client:
            front = Front(url, router, client)
            if wait:
                known = [engine for engine in front.router.pool.engines if engine.url != NOBODY]
                await until(lambda: all(engine.state == "ready" for engine in known), "engines are ready")
            yield front
            await until(front.is_idle, "no turn and no engine request is left")


@asynccontextmanager
async def operator(front: Front) -> AsyncIterator[aiohttp.ClientSession]:
    """Who asks on the operators' port."""
    async with listening(operators_runner(front.router)) as url, aiohttp.ClientSession(url) as client:
        yield client


@asynccontextmanager
async def listening(runner: web.BaseRunner) -> AsyncIterator[str]:
    """On a port of its own; its URL."""
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()

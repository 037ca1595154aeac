"""The processes of `backhaul up`: started in order, watched, stopped in order."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from backhaul import processes
from backhaul.display import Display
from backhaul.errors import CommandError
from backhaul.processes import Child, ChildDied
from backhaul.valkey import Store, start_valkey
from connectors.wire.seal import new_key

T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_POLL = 0.05
_GRACE = 4.0
"""Seconds a part gets to end after SIGTERM; its own drain timeout is shorter."""
_DRAIN_TIMEOUT = "2"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    name: str
    role: str
    flags: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunningEngine:
    url: str
    role: str
    pid: int
    model: str


@dataclass(frozen=True, slots=True)
class Running:
    """Everything is up."""

    router_url: str
    router_pid: int
    engines: tuple[RunningEngine, ...]
    store_url: str
    store_pid: int
    page_url: str
    """The router's status page."""

    @property
    def base_url(self) -> str:
        return f"{self.router_url}/v1"

    @property
    def model(self) -> str:
        return self.engines[0].model

    def to_json(self) -> dict[str, Any]:
        return {
            "base_url": self.base_url,
            "model": self.model,
            "router": {"url": self.router_url, "pid": self.router_pid},
            "engines": [{"url": engine.url, "role": engine.role, "pid": engine.pid} for engine in self.engines],
            "store": {"url": self.store_url, "pid": self.store_pid},
        }


class Stack:
    """Owns the child processes: leaving the context stops all of them."""

    def __init__(self, folder: Path, logs: Path, stop: asyncio.Event, *, log_level: str) -> None:
        """`folder` takes the parts' own files, `logs` what they print; `stop` is set when the user has had enough."""
        self._folder = folder
        self._logs = logs
        self._stop = stop
        self._log_level = log_level
        self._seal_key = new_key()
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._starting: dict[str, Path] = {}
        self._death: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the front first, so that nobody is promised an answer by engines that are gone; the store last."""
        for watcher in self._watchers:
            watcher.cancel()
        ranks = {"router": 0, "store": 2}
        for rank in (0, 1, 2):
            await asyncio.gather(*(child.stop(_GRACE) for child in self._children if ranks.get(child.name, 1) == rank))

    async def until(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` returns, or None if stop is set before; raises ChildDied when a part ends."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({working, stopping, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return None
            if self._death.done():
                raise ChildDied(self._death.result())
            return working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def start(
        self, engines: Sequence[EngineSpec], router_flags: Sequence[str], display: Display, *, within: float
    ) -> Running:
        """Start everything and return when requests can be served; `within` is in seconds."""
        try:
            async with asyncio.timeout(within):
                store, running = await self._start_backs(engines, display)
                facts, router = await self._start_router(router_flags, running, store, display)
        except TimeoutError:
            waiting = ", ".join(f"{name} ({log})" for name, log in self._starting.items())
            raise CommandError(f"not ready within {within:.0f} s: {waiting}") from None
        return Running(facts["url"], router.pid, running, store.url, store.child.pid, facts["operators_url"])

    async def _start_backs(
        self, engines: Sequence[EngineSpec], display: Display
    ) -> tuple[Store, tuple[RunningEngine, ...]]:
        try:
            async with asyncio.TaskGroup() as group:
                store = group.create_task(self._start_store(display))
                running = [group.create_task(self._start_engine(spec, display)) for spec in engines]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return store.result(), tuple(task.result() for task in running)

    async def _start_store(self, display: Display) -> Store:
        part = display.part("store", "starting")
        store = await start_valkey(self._folder, self._logs / "store.log")
        self._adopt(store.child)
        part.ready(store.url.rpartition("@")[2].partition("/")[0])
        return store

    async def _start_engine(self, spec: EngineSpec, display: Display) -> RunningEngine:
        flags = ["--role", spec.role, "--host", _LOOPBACK, "--port", "0", *spec.flags]
        part = display.part(spec.name, "loading the model")
        env = {"BACKHAUL_ENGINE_SEAL_KEY": self._seal_key}
        child, facts = await self._start_part(spec.name, "engine", flags, env)
        part.ready(facts["url"])
        return RunningEngine(facts["url"], spec.role, child.pid, facts["model"])

    async def _start_router(
        self, flags: Sequence[str], engines: Sequence[RunningEngine], store: Store, display: Display
    ) -> tuple[dict[str, Any], Child]:
        part = display.part("router", "starting")
        pools = [text for engine in engines for text in (f"--{engine.role}", engine.url)]
        # The URL holds the store's password: in the environment, where other users cannot read it.
        child, facts = await self._start_part(
            "router",
            "router",
            ["--drain-delay", "0", "--admin-port", "0", *flags, *pools],
            {"BACKHAUL_ROUTER_REDIS": store.url, "BACKHAUL_ROUTER_SEAL_KEY": self._seal_key},
        )
        url: str = facts["url"]
        while True:
            if await asyncio.to_thread(_is_ready, url):
                break
            await asyncio.sleep(_POLL)
        part.ready(url)
        return facts, child

    async def _start_part(
        self, name: str, command: str, flags: Sequence[str], env: Mapping[str, str] | None = None
    ) -> tuple[Child, dict[str, Any]]:
        """Start one of our own programs and wait for what it says about itself once it serves."""
        ready = self._folder / f"{name}.json"
        log = self._logs / f"{name}.log"
        # -P: a folder called engine/ or router/ where the user stands must not be imported as ours.
        program = [sys.executable, "-P", "-m", "backhaul", command]
        shared = ["--json-file", str(ready), "--log-level", self._log_level, "--drain-timeout", _DRAIN_TIMEOUT]
        self._starting[name] = log
        child = await processes.start(name, [*program, *flags, *shared], log=log, env=env)
        self._adopt(child)
        while True:
            try:
                facts: dict[str, Any] = json.loads(ready.read_text())
                break
            except (FileNotFoundError, json.JSONDecodeError):
                await asyncio.sleep(_POLL)
        del self._starting[name]
        return child, facts

    def _adopt(self, child: Child) -> None:
        self._children.append(child)
        self._watchers.append(asyncio.create_task(self._watch(child)))

    async def _watch(self, child: Child) -> None:
        await child.wait()
        if not self._death.done():
            self._death.set_result(child)


def _is_ready(url: str) -> bool:
    """Whether the router serves turns, and has heard from every engine: they are ready before it is started."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or _LOOPBACK, where.port, timeout=2.0)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        engines = json.loads(response.read())["engines"]
        return response.status == 200 and all(engine["state"] == "ready" for engine in engines)
    except (OSError, ValueError, LookupError):
        return False
    finally:
        connection.close()

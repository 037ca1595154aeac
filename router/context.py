"""What the handlers share: the parts of one running router."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from aiohttp import web

from router.breakeven import BreakEven
from router.config import RouterConfig
from router.metrics import Metrics
from router.pool import Pool
from router.running import Running
from router.store import Store
from router.sweep import Sweeper
from router.upstream import Upstream

T = TypeVar("T")


class Background:
    """Short work that outlives the request it began with; waited for a little at the end, then cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    def start(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self, seconds: float) -> None:
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()


class InFlight:
    """How many turns are being served."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    async def end(self) -> None:
        """Wait until none is."""
        await self._idle.wait()


@dataclass(slots=True)
class Router:
    config: RouterConfig
    metrics: Metrics
    pool: Pool
    upstream: Upstream
    store: Store
    sweeper: Sweeper
    break_even: BreakEven
    turns: InFlight = field(default_factory=InFlight)
    running: Running = field(default_factory=Running)
    background: Background = field(default_factory=Background)
    draining: bool = False
    """Set by SIGTERM: /ready says no, connections are not kept, requests are still served."""

    @property
    def ready(self) -> bool:
        """Whether new requests should come here: turns can be served, and we are not about to stop."""
        needs_prefill = bool(self.pool.prefill) and self.config.prefill_fallback == "fail"
        return self.pool.is_up("decode") and (self.pool.is_up("prefill") or not needs_prefill) and not self.draining


ROUTER: Final = web.AppKey("router", Router)
REQUEST_ID: Final = web.RequestKey("request_id", str)

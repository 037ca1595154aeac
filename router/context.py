"""What the handlers share: the parts of one running router."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from router.admission import Gate
from router.background import Background, InFlight
from router.breakeven import BreakEven
from router.budget import RetryBudget
from router.config import RouterConfig
from router.holdings import Holdings
from router.metrics import Metrics
from router.pool import Pool
from router.recent import Recent
from router.release import Releases
from router.running import Running
from router.siblings import Siblings
from router.store import Store
from router.sweep import Sweeper
from router.tracing import Tracing
from router.upstream import Upstream


@dataclass(slots=True)
class Router:
    config: RouterConfig
    metrics: Metrics
    pool: Pool
    upstream: Upstream
    store: Store
    releases: Releases
    sweeper: Sweeper
    holdings: Holdings
    break_even: BreakEven
    background: Background
    budget: RetryBudget
    prefill_gate: Gate
    decode_gate: Gate
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """Kept: to ask which one is running is a call to the system, up to Python 3.11."""
    tracing: Tracing | None = None
    """Only where turns are traced."""
    turns: InFlight = field(default_factory=InFlight)
    recent: Recent = field(default_factory=Recent)
    running: Running = field(default_factory=Running)
    siblings: Siblings = field(default_factory=Siblings)
    draining: bool = False
    """Set by SIGTERM: /ready says no, connections are not kept, requests are still served."""

    @property
    def ready(self) -> bool:
        """Whether new requests should come here: turns can be served, and we are not about to stop."""
        needs_prefill = self.pool.has("prefill") and self.config.prefill_fallback == "fail"
        serves = self.pool.is_up("decode") and (self.pool.is_up("prefill") or not needs_prefill)
        return serves and not self.draining and self.siblings.all_listen


class Request(web.BaseRequest):
    """What a client asks."""

    id: str
    """Names it, to the client, to engines and in logs."""


def finish_headers(router: Router, request: Request, response: web.StreamResponse) -> None:
    """The headers that every response has."""
    headers = response.headers
    headers["Server"] = "backhaul"
    headers["X-Request-Id"] = request.id
    if router.draining:
        headers["Connection"] = "close"
        response.force_close()

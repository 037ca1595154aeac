"""What orchestrators, scrapers and operators ask: /health, /ready, /metrics, /admin/status."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from router.context import ROUTER
from router.metrics import CONTENT_TYPE
from router.status import status_of

STATUS_PATH: Final = "/admin/status"


async def health(_: web.Request) -> web.Response:
    """The process lives. Says nothing about engines or Redis, so that their faults never restart the router."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Whether new requests should come here, and why not."""
    router = request.app[ROUTER]
    body = {
        "ready": router.ready,
        "draining": router.draining,
        "engines": [
            {"url": engine.url, "role": engine.role, "state": engine.state, "models": sorted(engine.models)}
            for engine in router.pool.engines
        ],
    }
    return web.json_response(body, status=200 if router.ready else 503)


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[ROUTER].metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def status(request: web.Request) -> web.Response:
    """The engines, what they can do and how that is known, and what turns do without. Holds no secret and nothing of
    any conversation, but names engines: not for clients."""
    return web.json_response(status_of(request.app[ROUTER]), headers={"Cache-Control": "no-store"})

"""What orchestrators, scrapers and operators ask: /health, /ready, /metrics, /admin/status, /admin/drain."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from connectors.wire.openai import APIError, bad_request
from router.body import read_object
from router.context import ROUTER
from router.metrics import CONTENT_TYPE
from router.status import status_of

STATUS_PATH: Final = "/admin/status"
DRAIN_PATH: Final = "/admin/drain"
MAX_BODY_BYTES: Final = 64 << 10


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
            {"url": engine.name, "role": engine.role, "state": engine.state, "models": sorted(engine.models)}
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


async def drain(request: web.Request) -> web.Response:
    """Have an engine drained, or take that back: `{"engine": URL, "role": "prefill" or "decode", "drain": true}`.

    It gets no new turns, finishes what it has, and its blocks may still be read; until this router ends, or is told
    otherwise."""
    router = request.app[ROUTER]
    body = await read_object(request, MAX_BODY_BYTES)
    url, role, on = body.get("engine"), body.get("role"), body.get("drain", True)
    if not isinstance(url, str):
        raise bad_request("The URL of an engine expected, as the status names it.", param="engine")
    if role not in (None, "prefill", "decode"):
        raise bad_request("prefill or decode expected, or nothing for both.", param="role")
    if not isinstance(on, bool):
        raise bad_request("true or false expected.", param="drain")
    engines = router.pool.drain(url.rstrip("/"), role, on=on)
    if not engines:
        raise APIError(404, "There is no such engine.", type="NotFoundError", param="engine")
    told = [{"url": one.name, "role": one.role, "state": one.state, "in_flight": one.in_flight} for one in engines]
    return web.json_response({"engines": told})

"""What orchestrators, scrapers and operators ask: /health, /ready, /metrics, /admin/status, /admin/drain."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from connectors.wire.openai import APIError, bad_request
from router import drains, jsontext
from router.body import read_object
from router.context import Request, Router
from router.metrics import CONTENT_TYPE
from router.siblings import METRICS
from router.status import models_of, status_of

STATUS_PATH: Final = "/admin/status"
DRAIN_PATH: Final = "/admin/drain"
MAX_BODY_BYTES: Final = 64 << 10
NOT_STORED: Final = {"Cache-Control": "no-store"}


async def health(_: Router, __: Request) -> web.Response:
    """The process lives. Says nothing about engines or Redis, so that their faults never restart the router."""
    return web.json_response({"status": "ok"})


async def ready(router: Router, _: Request) -> web.Response:
    """Whether new requests should come here, and why not."""
    body = {
        "ready": router.ready,
        "draining": router.draining,
        "engines": [
            {"url": engine.name, "role": engine.role, "state": engine.state, "models": models_of(engine)}
            for engine in router.pool.engines
        ],
    }
    return web.json_response(body, status=200 if router.ready else 503)


async def metrics(router: Router, _: Request) -> web.Response:
    """Of all processes of this router."""
    [text] = await router.siblings.gather(METRICS)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


async def status(router: Router, _: Request) -> web.Response:
    """The engines, what they can do and how that is known, and what turns do without. Holds no secret and nothing of
    any conversation, but names engines: not for clients."""
    return await _status(router, recent=False)


async def operators_status(router: Router, _: Request) -> web.Response:
    """The same, with what turns did of late."""
    return await _status(router, recent=True)


async def _status(router: Router, *, recent: bool) -> web.Response:
    told = await status_of(router, recent=recent)
    return web.Response(body=jsontext.dumps(told), content_type="application/json", headers=NOT_STORED)


async def drain(router: Router, request: Request) -> web.Response:
    """Have an engine drained, or take that back: `{"engine": URL, "role": ROLE, "drain": true}`.

    It gets no new turns, finishes what it has, and its blocks may still be read; until this router ends, or is told
    otherwise."""
    body = await read_object(request, MAX_BODY_BYTES)
    url, role, on = body.get("engine"), body.get("role"), body.get("drain", True)
    if not isinstance(url, str):
        raise bad_request("The URL of an engine expected, as the status names it.", param="engine")
    if role not in (None, "prefill", "decode", "encode"):
        raise bad_request("prefill, decode or encode expected, or nothing for all.", param="role")
    if not isinstance(on, bool):
        raise bad_request("true or false expected.", param="drain")
    engines = await drains.drain(router, url.rstrip("/"), role, on=on)
    if not engines:
        raise APIError(404, "There is no such engine.", type="NotFoundError", param="engine")
    return web.json_response({"engines": engines})

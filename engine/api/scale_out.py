"""The routes of --enable-scale-out: for deployments that template and parse elsewhere than they generate."""

from __future__ import annotations

from functools import wraps

from aiohttp import web

from connectors.wire.openai import APIError
from engine.api.call import Handler
from engine.api.context import WORKER


def scale_out(handler: Handler) -> Handler:
    """The handler, or a 403 before the body is read where these routes are switched off."""

    @wraps(handler)
    async def guarded(request: web.Request) -> web.StreamResponse:
        if not request.app[WORKER].config.enable_scale_out:
            raise APIError(
                403,
                f"{request.path} is switched off: start the engine with --enable-scale-out",
                type="PermissionDeniedError",
            )
        return await handler(request)

    return guarded

"""`/v1/models`: the models the engines serve."""

from __future__ import annotations

from aiohttp import web

from connectors.wire.openai import model_not_found, unavailable
from router.context import Request, Router


async def list_models(router: Router, _: Request) -> web.Response:
    models = router.pool.models()
    if not models:
        raise unavailable("No engine has listed its models yet. Try again in a moment.")
    return web.json_response({"object": "list", "data": [models[name] for name in sorted(models)]})


async def get_model(router: Router, request: Request) -> web.Response:
    name = request.path.removeprefix("/v1/models/")
    models = router.pool.models()
    if not models:
        raise unavailable("No engine has listed its models yet. Try again in a moment.")
    if name not in models:
        raise model_not_found(name)
    return web.json_response(models[name])

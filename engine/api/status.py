"""What the engine says about itself: health, version, models, metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from connectors.wire.openai import model_not_found
from engine.api.context import WORKER, Serving
from engine.api.generation import Json, json_response


async def health(request: web.Request) -> web.Response:
    """200 with an empty body once requests are served; 503 before, and while shutting down."""
    request.app[WORKER].require_accepting()
    return web.Response()


async def show_version(request: web.Request) -> web.Response:
    try:
        return json_response({"version": version("backhaul")})
    except PackageNotFoundError:  # run from a source tree that is not installed
        return json_response({"version": "unknown"})


async def models(request: web.Request) -> web.Response:
    serving = request.app[WORKER].require_accepting()
    return json_response({"object": "list", "data": [_card(serving)]})


async def model(request: web.Request) -> web.Response:
    serving = request.app[WORKER].require_accepting()
    name = request.match_info["name"]
    if name != serving.model_name:
        raise model_not_found(name)
    return json_response(_card(serving))


async def metrics(request: web.Request) -> web.Response:
    text = request.app[WORKER].require_serving().metrics.exposition()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _card(serving: Serving) -> Json:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.created,
        "owned_by": "backhaul",
        "root": serving.model_name,
        "parent": None,
        "max_model_len": serving.max_model_len,
        "permission": [],
    }

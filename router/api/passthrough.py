"""Requests that any one engine can answer: tokenizing, templates, and what engines tell about themselves."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from connectors.wire.openai import bad_request, model_not_found, unavailable
from router import headers
from router.body import read_object
from router.clean import without_engine_talk
from router.context import Request, Router
from router.faults import EngineFault
from router.member import Engine, Role

POSTS: Final = (
    *("/tokenize", "/detokenize"),
    *("/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render"),
    *("/v1/chat/completions/derender", "/v1/completions/derender"),
    "/v1/responses/{id}/cancel",
)
# Of other paths nobody knows what they would do, or tell, of an engine.
GETS: Final = ("/version", "/tokenizer_info", "/v1/{rest:.+}")
NO_GETS: Final = frozenset({*POSTS, "/v1/chat/completions", "/v1/completions", "/v1/responses"})


async def post(router: Router, request: Request) -> web.Response:
    body = await read_object(request, router.config.max_body_bytes)
    body = without_engine_talk(body, request.headers, refuse=router.config.client_transfer_params == "refuse")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_request("A string expected.", param="model")
    rather: Role = "prefill" if request.path in POSTS else "decode"  # what has an id was made by a decode engine
    return await _ask(router, request, model, body, rather=rather)


async def get(router: Router, request: Request) -> web.Response:
    if request.path in NO_GETS:
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])
    if request.method != "GET":
        raise web.HTTPNotFound
    return await _ask(router, request, None, None, rather="decode")


async def _ask(
    router: Router, request: Request, model: str | None, body: dict[str, object] | None, *, rather: Role
) -> web.Response:
    """The answer of one engine; of another if that one cannot answer, or its own at a second try if it broke off."""
    tried: set[str] = set()
    leg_headers = headers.onward(request.headers, request.id)
    for last in (False, True):
        engine = _choose(router, model, rather, tried)
        try:
            answer = await router.upstream.ask(engine, request.method, request.rel_url, body, leg_headers)
            break
        except EngineFault as fault:
            tried.add(engine.url)
            if not _able(router, model, tried) and fault.kind == "disconnected":
                tried.clear()
            if last or not _able(router, model, tried):
                raise
    return web.Response(body=answer.body, headers=headers.back(answer.headers))


def _choose(router: Router, model: str | None, rather: Role, tried: set[str]) -> Engine:
    able = _able(router, model, tried)
    if not able:
        if model is not None and router.pool.models() and model not in router.pool.models():
            raise model_not_found(model)
        raise unavailable("No engine is ready for this now. Try again in a moment.")
    return min(able, key=lambda engine: (engine.spared, engine.role != rather, engine.load, engine.last))


def _able(router: Router, model: str | None, tried: set[str]) -> list[Engine]:
    return [
        engine
        for engine in router.pool.generating
        if engine.ready and engine.url not in tried and (model is None or model in engine.models)
    ]

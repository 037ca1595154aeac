"""The worker's routes, and the middlewares every request passes through."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from connectors.wire.openai import APIError, error_body
from connectors.wire.openapi import PATH
from engine.api import abort, chat, completions, derender, generate, kv, render, responses, status, tokens
from engine.api.call import REQUEST_ID, Handler, request_id, settle_debt
from engine.api.context import WORKER, Worker
from engine.api.generation import json_response
from engine.api.scale_out import scale_out
from engine.openapi import openapi

logger = logging.getLogger(__name__)

OPENAI = (
    web.post("/v1/chat/completions", chat.create),
    web.post("/v1/completions", completions.create),
    web.post("/v1/responses", responses.create),
    web.get("/v1/responses/{id}", responses.not_found),
    web.delete("/v1/responses/{id}", responses.not_found),
    web.get("/v1/responses/{id}/input_items", responses.not_found),
    web.post("/v1/responses/{id}/cancel", responses.not_found),
)
SCALE_OUT = (
    web.post("/inference/v1/generate", scale_out(generate.create)),
    web.post("/inference/v1/abort_requests", scale_out(abort.abort)),
    web.post("/v1/chat/completions/render", scale_out(render.chat)),
    web.post("/v1/completions/render", scale_out(render.completions)),
    web.post("/v1/responses/render", scale_out(render.responses)),
    web.post("/v1/chat/completions/derender", scale_out(derender.chat)),
    web.post("/v1/completions/derender", scale_out(derender.completions)),
)
TOKENS = (
    web.post("/tokenize", tokens.tokenize),
    web.post("/detokenize", tokens.detokenize),
)
STATUS = (
    web.get("/v1/models", status.models),
    web.get("/v1/models/{name:.+}", status.model),
    web.get("/health", status.health),
    web.get("/ping", status.health),
    web.post("/ping", status.health),
    web.get("/version", status.show_version),
    web.get("/metrics", status.metrics),
    web.get(PATH, openapi),
)
PEERS = (
    web.get("/kv/agent", kv.agent),
    web.post("/kv/claim", kv.claim),
    web.post("/kv/renew", kv.renew),
    web.post("/kv/release", kv.release),
    web.get("/ec/agent", kv.agent),
    web.post("/ec/claim", kv.claim),
    web.post("/ec/renew", kv.renew),
    web.post("/ec/release", kv.release),
)
CLIENT_LEFT = 499
"""Never sent; what proxies log for it."""


def make_app(worker: Worker) -> web.Application:
    logging.getLogger("aiohttp.server").addFilter(_no_malformed_http)
    app = web.Application(
        middlewares=[identify, answer_errors, settle_debt], client_max_size=worker.config.max_body_bytes
    )
    app[WORKER] = worker
    app.on_response_prepare.append(_echo_request_id)
    for table in (OPENAI, SCALE_OUT, TOKENS, STATUS, PEERS):
        app.add_routes(table)
    return app


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, for logs, ids in answers and the response's X-Request-Id."""
    request[REQUEST_ID] = request_id(request)
    return await handler(request)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an OpenAI-shaped answer."""
    try:
        return await handler(request)
    except APIError as error:
        response = json_response(error.body(), status=error.status)
        response.headers.update(error.headers)
        return response
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[WORKER].config.max_body_bytes
        return _error(
            413, f"the body is larger than {limit} bytes, the limit set by --max-body-bytes", "BadRequestError"
        )
    except web.HTTPException as error:
        kind = "NotFoundError" if error.status == 404 else "BadRequestError"
        response = _error(error.status, f"{request.method} {request.path}: {error.reason}", kind)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:  # the client left before the answer began; nobody will read this one either
        return web.Response(status=CLIENT_LEFT)
    except Exception:
        logger.exception("a handler failed", extra={"request_id": request[REQUEST_ID]})
        return _error(500, "internal error; the engine's log has the details", "InternalServerError")


def _error(status: int, message: str, type: str) -> web.Response:
    return json_response(error_body(message, type=type, code=status), status=status)


def _no_malformed_http(record: logging.LogRecord) -> bool:
    """False for a client's malformed HTTP: answered with 400, it is no fault of ours to log a traceback for."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage | web.RequestPayloadError))


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]

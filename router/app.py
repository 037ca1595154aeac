"""The aiohttp application: routes, the parts behind them, and what every response has."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Final

from aiohttp import web

from connectors.wire.openai import APIError, error_body
from connectors.wire.openapi import PATH
from connectors.wire.seal import SealKeys
from router import admin, drains, jsontext, page, status
from router.admission import Gate
from router.api import abort, models, passthrough
from router.api.chat import Chat
from router.api.completions import Completions
from router.api.generate import Generate
from router.api.legs import Endpoint
from router.api.responses import Responses
from router.background import Background
from router.breakeven import BreakEven
from router.budget import RetryBudget
from router.client import Client
from router.config import RouterConfig
from router.context import REQUEST_ID, ROUTER, Router, finish_headers
from router.discovery.follow import Discovery
from router.discovery.kube import Cluster
from router.doors import for_operators
from router.headers import request_id
from router.holdings import Holdings
from router.member import Role
from router.metrics import Metrics
from router.openapi import openapi
from router.pool import Pool
from router.release import Releases
from router.siblings import METRICS, SNAPSHOT
from router.status import STATUS
from router.store import Store
from router.sweep import Sweeper
from router.tracing import check_tracing, open_tracing
from router.turn import run_turn
from router.upstream import ABORT_PATH, RELEASE_SECONDS, Upstream
from router.watch import Watch

ENDPOINTS: Final[tuple[Endpoint, ...]] = (Chat(), Completions(), Responses(), Generate())

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "encode")
NOWHERE: Final = "nowhere"

log = logging.getLogger("router")


def build_app(config: RouterConfig) -> web.Application:
    """Raises ValueError for settings that only now turn out to be wrong."""
    seals = SealKeys.from_settings(config.seal_key, config.seal_key_file)
    if config.trace_endpoint is not None:
        check_tracing()
    app = web.Application(client_max_size=config.max_body_bytes)
    routes: list[tuple[str, str, Handler]] = [
        *(("POST", endpoint.path, partial(run_turn, endpoint=endpoint)) for endpoint in ENDPOINTS),
        ("POST", ABORT_PATH, abort.abort_requests),
        *(("POST", path, passthrough.post) for path in passthrough.POSTS),
        ("GET", "/v1/models", models.list_models),
        ("GET", "/v1/models/{model:.+}", models.get_model),
        *(("*", path, passthrough.get) for path in passthrough.GETS),
        ("GET", "/ping", admin.health),
        ("GET", "/health", admin.health),
        ("GET", "/ready", admin.ready),
        ("GET", "/metrics", admin.metrics),
        *([("GET", admin.STATUS_PATH, admin.status)] if config.status else []),
        ("GET", PATH, openapi),
    ]
    _route(app, routes)
    app.cleanup_ctx.append(lambda app: parts(app, config, seals))
    return app


async def parts(app: web.Application, config: RouterConfig, seals: SealKeys | None) -> AsyncIterator[None]:
    """Everything with a life of its own: started before the first request, ended after the last."""
    metrics = Metrics([endpoint.name for endpoint in ENDPOINTS])
    store = Store(
        config.redis,
        password_file=config.redis_password_file,
        timeout=config.redis_timeout,
        max_record_bytes=config.max_record_bytes,
        metrics=metrics,
    )
    tracing = open_tracing(config.trace_endpoint, config.trace_sample) if config.trace_endpoint else None
    break_even, background = BreakEven(config.decode_only_tokens), Background()
    async with Client(config.connect_timeout) as client:
        pool = Pool([role for role in ROLES if config.entries(role)], stated=config.engines, limits=config.limits)
        watch = Watch(pool, client, interval=config.probe_interval, timeout=config.probe_timeout)
        discovery = Discovery(pool, {role: config.entries(role) for role in ROLES}, Cluster(config.service_account))
        prefill_gate, decode_gate = _gate(config, pool, "prefill"), _gate(config, pool, "decode")
        upstream = Upstream(
            client,
            pool,
            metrics,
            background,
            prefill_timeout=config.prefill_timeout,
            first_byte_timeout=config.first_byte_timeout,
            idle_timeout=config.idle_timeout,
            tokenize_timeout=config.tokenize_timeout,
            seals=seals,
        )
        releases = Releases(upstream, pool, background)
        holdings = Holdings(pool, store, releases, background, metrics, share=config.idle_kv_share)
        sweeper = Sweeper(store, releases.release, due=holdings.taken)
        router = app[ROUTER] = Router(
            config=config,
            metrics=metrics,
            pool=pool,
            upstream=upstream,
            store=store,
            releases=releases,
            sweeper=sweeper,
            holdings=holdings,
            break_even=break_even,
            background=background,
            budget=RetryBudget(config.retry_share),
            prefill_gate=prefill_gate,
            decode_gate=decode_gate,
            tracing=tracing,
        )
        metrics.follow(
            pool, lambda: router.turns.count, lambda: break_even.tokens, prefill=prefill_gate, decode=decode_gate
        )
        router.siblings.answer(METRICS, metrics.tell)
        router.siblings.answer(abort.ABORT, abort.answers(router))
        router.siblings.answer(drains.DRAIN, drains.answers(router))
        router.siblings.answer(STATUS, status.answers(router))
        router.siblings.answer(SNAPSHOT, metrics.tell_siblings)
        pinging = background.start(store.ping())  # says in the log if nobody answers
        sweeper.start()
        watch.start()
        discovery.start()
        await pinging
        yield
        await discovery.close()
        await watch.close()
        await sweeper.close()
        await background.settle(RELEASE_SECONDS)
    await store.close()
    if tracing is not None:
        await tracing.close()


def _gate(config: RouterConfig, pool: Pool, role: Role) -> Gate:
    gate = Gate(role, lambda: pool.of(role), per_engine=config.limits[role], most_waiting=config.max_waiting)
    pool.on_change.append(gate.let_in)
    return gate


def build_admin_app(router: Router) -> web.Application:
    """What only operators are answered, on a port of their own."""
    app = web.Application()
    app[ROUTER] = router
    routes: list[tuple[str, str, Handler]] = [
        ("GET", "/health", admin.health),
        ("GET", "/ready", admin.ready),
        ("GET", "/metrics", admin.metrics),
        ("GET", admin.STATUS_PATH, for_operators(admin.operators_status)),
        *(("GET", path, for_operators(handler)) for path, handler in page.routes()),
        ("POST", admin.DRAIN_PATH, for_operators(admin.drain)),
    ]
    _route(app, routes)
    return app


def _route(app: web.Application, routes: Iterable[tuple[str, str, Handler]]) -> None:
    for method, path, handler in routes:
        if method == "GET":
            app.router.add_get(path, guarded(handler))  # and HEAD
        else:
            app.router.add_route(method, path, guarded(handler))
    app.router.add_route("*", "/{path:.*}", guarded(nowhere), name=NOWHERE)


def guarded(handler: Handler) -> Handler:
    """With every error leaving as an OpenAI error body, and the headers that every response has. Around each handler
    rather than as a middleware, which would be looked up for every request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = request_id(request.headers)
        try:
            response = await handler(request)
        except Exception as error:
            response = told(request, error)
        if not response.prepared:  # else it is a stream, and has them
            finish_headers(request, response)
        return response

    return handle


def told(request: web.Request, error: Exception) -> web.Response:
    """What the client gets to know of an error."""
    match error:
        case APIError():
            return json_error(error.status, error.body(), error.headers)
        case web.HTTPException():
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            message = f"{error.reason}: {request.method} {request.path}"
            kind = "NotFoundError" if error.status == 404 else "BadRequestError"
            return json_error(error.status, error_body(message, type=kind, code=error.status), headers)
        case ConnectionResetError():
            return web.Response()  # nobody will get it: the client has left, which is no error of ours
    log.error("a handler failed", exc_info=error, extra={"request_id": request[REQUEST_ID]})
    return json_error(500, error_body("Internal error of the router.", type="InternalServerError", code=500))


async def nowhere(request: web.Request) -> web.StreamResponse:
    """There is no such path, or it takes other methods."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name != NOWHERE:
            allowed |= (await resource.resolve(request))[1]
    if allowed:
        raise web.HTTPMethodNotAllowed(request.method, sorted(allowed))
    raise web.HTTPNotFound


def json_error(status: int, body: dict[str, object], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=jsontext.dumps(body), content_type="application/json", headers=headers)

"""What is served: the routes of both ports, and the parts behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from aiohttp import web

from connectors.wire.openapi import PATH
from connectors.wire.seal import SealKeys
from router import admin, drains, page, status
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
from router.context import Router
from router.discovery.follow import Discovery
from router.discovery.kube import Cluster
from router.doors import for_operators
from router.front import ANY, Front, Route
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

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "encode")
CUT_SECONDS: Final = 1.0  # for what did not end while draining


def check_settings(config: RouterConfig) -> None:
    """Raises ValueError for settings that only now turn out to be wrong."""
    SealKeys.from_settings(config.seal_key, config.seal_key_file)
    if config.trace_endpoint is not None:
        check_tracing()


def routes(config: RouterConfig) -> list[Route]:
    """What clients are answered."""
    return [
        *(Route("POST", endpoint.path, partial(run_turn, endpoint=endpoint)) for endpoint in ENDPOINTS),
        Route("POST", ABORT_PATH, abort.abort_requests),
        *(Route("POST", path, passthrough.post) for path in passthrough.POSTS),
        Route("GET", "/v1/models", models.list_models),
        Route("GET", "/v1/models/{model:.+}", models.get_model),
        *(Route(ANY, path, passthrough.get) for path in passthrough.GETS),
        Route("GET", "/ping", admin.health),
        Route("GET", "/health", admin.health),
        Route("GET", "/ready", admin.ready),
        Route("GET", "/metrics", admin.metrics),
        *([Route("GET", admin.STATUS_PATH, admin.status)] if config.status else []),
        Route("GET", PATH, openapi),
    ]


def operators_routes() -> list[Route]:
    """What only operators are answered, on a port of their own."""
    return [
        Route("GET", "/health", admin.health),
        Route("GET", "/ready", admin.ready),
        Route("GET", "/metrics", admin.metrics),
        Route("GET", admin.STATUS_PATH, for_operators(admin.operators_status)),
        *(Route("GET", path, for_operators(handler)) for path, handler in page.routes()),
        Route("POST", admin.DRAIN_PATH, for_operators(admin.drain)),
    ]


def clients_runner(router: Router) -> web.ServerRunner:
    """A client that leaves ends its turn, in whatever phase."""
    front = Front(router, routes(router.config))
    return front.runner(shutdown_timeout=CUT_SECONDS, handler_cancellation=True)


def operators_runner(router: Router) -> web.ServerRunner:
    return Front(router, operators_routes()).runner(shutdown_timeout=CUT_SECONDS)


@asynccontextmanager
async def open_router(config: RouterConfig) -> AsyncIterator[Router]:
    """Everything with a life of its own: started before the first request, ended after the last. Raises ValueError for
    settings that only now turn out to be wrong."""
    check_settings(config)
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
    try:
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
                seals=SealKeys.from_settings(config.seal_key, config.seal_key_file),
            )
            releases = Releases(upstream, pool, background)
            holdings = Holdings(pool, store, releases, background, metrics, share=config.idle_kv_share)
            sweeper = Sweeper(store, releases.release, due=holdings.taken)
            router = Router(
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
            try:
                yield router
            finally:
                await discovery.close()
                await watch.close()
                await sweeper.close()
                await background.settle(RELEASE_SECONDS)
                await router.siblings.close()
    finally:
        await store.close()
        if tracing is not None:
            await tracing.close()


def _gate(config: RouterConfig, pool: Pool, role: Role) -> Gate:
    gate = Gate(role, lambda: pool.of(role), per_engine=config.limits[role], most_waiting=config.max_waiting)
    pool.on_change.append(gate.let_in)
    return gate

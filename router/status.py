"""What `GET /admin/status` tells: the router, its engines with what they do and can do, what turns did without, and
Redis. Operators are told of the last turns besides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from prometheus_client import Metric

from connectors.wire.openai import APIError
from router import jsontext
from router.capabilities import FACTS, OURS, lowers
from router.context import Router
from router.load import Load
from router.member import Engine
from router.merged import merged
from router.names import shown
from router.siblings import Answer

Json = dict[str, Any]

MAX_MODELS: Final = 100
"""Names of one engine's models; beyond, only how many there are."""


STATUS: Final = "status"
"""What processes ask each other."""
RECENT: Final = b"recent"
OBSERVED_SECONDS: Final = 15.0
"""For which engines are asked how busy they are, after somebody wanted to know."""


async def status_of(router: Router, *, recent: bool) -> Json:
    """Of all processes of this router. `recent`: with what turns did of late."""
    question = RECENT if recent else b""
    try:
        told = await router.siblings.gather(STATUS, question)
    except APIError:  # nobody passes it on
        told = []
    return merged([jsontext.loads(one) for one in told] or [await _own(router, recent=recent)])


def answers(router: Router) -> Answer:
    """How this process answers the others."""

    async def answer(question: bytes) -> bytes:
        return jsontext.dumps(await _own(router, recent=question == RECENT))

    return answer


async def _own(router: Router, *, recent: bool) -> Json:
    router.pool.observed_until = asyncio.get_running_loop().time() + OBSERVED_SECONDS
    await router.store.ping()
    return describe(router) | ({"recent": router.recent.describe()} if recent else {})


def describe(router: Router) -> Json:
    metrics = router.metrics
    return {
        "version": _version(),
        "at": round(time.time(), 3),
        "processes": 1,
        "ready": router.ready,
        "draining": router.draining,
        "turns_in_flight": router.turns.count,
        "turns_waiting": {"prefill": router.prefill_gate.num_waiting, "decode": router.decode_gate.num_waiting},
        "offers_watched": router.sweeper.num_watched,
        "break_even_tokens": router.break_even.tokens,
        "redis": router.store.health() | {"operations": _totals(metrics.store_operations.collect(), "result")},
        "engines": [_engine(router, engine) for engine in router.pool.engines],
        "turns": _totals(metrics.turns.collect(), "outcome"),
        "plans": _totals(metrics.plans.collect(), "reason"),
        "last_kv": _totals(metrics.plans.collect(), "kv"),
        "releases": _totals(metrics.releases.collect(), "result"),
        "lowered": _rows(metrics.lowered.collect()),
    }


def _engine(router: Router, engine: Engine) -> Json:
    known, reported = engine.known.now, engine.reported
    facts = {
        name: {"value": value, "source": known.sources[name]}
        for name in FACTS
        if (value := getattr(known, name)) is not None
    }
    return {
        "url": engine.name,
        "role": engine.role,
        "state": engine.state,
        "why": engine.why,
        "since": round(engine.since, 3),
        "in_flight": engine.in_flight,
        "limit": engine.limit,
        "load": _load(reported, ours=known.kind == OURS) if reported.is_told else None,
        "idle_kv_blocks": router.holdings.num_blocks(engine.url) if engine.role == "decode" else None,
        "dispatched": engine.dispatched,
        "models": models_of(engine),
        "num_models": len(engine.models),
        "capabilities": facts,
        "lowers": [lowered._asdict() for lowered in lowers(known, engine.role)] if engine.models else [],
    }


def models_of(engine: Engine) -> list[str]:
    return [shown(name) for name in sorted(engine.models)[:MAX_MODELS]]


def _load(load: Load, *, ours: bool) -> Json:
    """As the engine tells it, others' requests included."""
    told: Json = {
        "running": int(load.running),
        "waiting": int(load.waiting),
        "kv_use": round(load.kv_use, 4),
    }
    if ours:
        told |= {
            "leases": int(load.leases),
            "blocks_pinned": int(load.pinned),
            "blocks_idle": int(load.idle),
        }
    return told


def _totals(families: Iterable[Metric], label: str) -> dict[str, int]:
    """A counter's increases, by one of its labels."""
    totals: dict[str, int] = {}
    for row in _rows(families):
        totals[row[label]] = totals.get(row[label], 0) + row["count"]
    return dict(sorted(totals.items()))


def _rows(families: Iterable[Metric]) -> list[Json]:
    samples = [sample for family in families for sample in family.samples if sample.name.endswith("_total")]
    return [{**sample.labels, "count": int(sample.value)} for sample in samples]


def _version() -> str:
    try:
        return version("backhaul")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"

"""What `GET /admin/status` tells: the router, its engines with what they can do, and what turns did without."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from prometheus_client import Metric

from router.capabilities import FACTS, lowers
from router.context import Router
from router.member import Engine

Json = dict[str, Any]

MAX_MODELS: Final = 100
"""Names of one engine's models; beyond, only how many there are."""


def status_of(router: Router) -> Json:
    metrics = router.metrics
    return {
        "version": _version(),
        "ready": router.ready,
        "draining": router.draining,
        "turns_in_flight": router.turns.count,
        "engines": [_engine(engine) for engine in router.pool.engines],
        "turns": _totals(metrics.turns.collect(), "outcome"),
        "plans": _totals(metrics.plans.collect(), "reason"),
        "last_kv": _totals(metrics.plans.collect(), "kv"),
        "releases": _totals(metrics.releases.collect(), "result"),
        "lowered": _rows(metrics.lowered.collect()),
    }


def _engine(engine: Engine) -> Json:
    known = engine.known.now
    facts = {
        name: {"value": value, "source": known.sources[name]}
        for name in FACTS
        if (value := getattr(known, name)) is not None
    }
    return {
        "url": engine.name,
        "role": engine.role,
        "state": engine.state,
        "in_flight": engine.in_flight,
        "dispatched": engine.dispatched,
        "models": sorted(engine.models)[:MAX_MODELS],
        "num_models": len(engine.models),
        "capabilities": facts,
        "lowers": [lowered._asdict() for lowered in lowers(known, engine.role)] if engine.models else [],
    }


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

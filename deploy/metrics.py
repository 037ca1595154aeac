"""The tables of docs/metrics.md, made from the metrics that router and engine declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric

from deploy.documented import between
from engine.media.readings import media_readings
from engine.metrics import EngineMetrics
from engine.readings import engine_readings
from router.admission import Gate
from router.metrics import Metrics
from router.pool import Pool

NO_REAL_LABELS: Final = ("le",)


class _Anything:
    """Stands for the parts of an engine, whose numbers are not read here."""

    def __getattr__(self, name: str) -> _Anything:
        return self


def router_metrics() -> CollectorRegistry:
    metrics = Metrics([])
    gates = [Gate(role, tuple, per_engine=None, most_waiting=0) for role in ("prefill", "decode")]
    metrics.follow(Pool([]), lambda: 0.0, lambda: 0.0, prefill=gates[0], decode=gates[1])
    metrics.idle_blocks.labels("")
    return metrics.registry


def engine_metrics() -> CollectorRegistry:
    metrics = EngineMetrics("", kv_transfer=True)
    anything: Any = _Anything()
    readings = (*engine_readings(anything, anything, anything), *media_readings(anything, anything))
    metrics.watch(replace(reading, read=lambda: 0.0) for reading in readings)
    return metrics.registry


def table(families: Iterable[Metric]) -> str:
    rows = (f"| `{name}` | {kind} | {', '.join(labels)} | {text} |" for name, kind, labels, text in _rows(families))
    return "\n".join(["| metric | type | labels | |", "| --- | --- | --- | --- |", *rows])


def _rows(families: Iterable[Metric]) -> Iterator[tuple[str, str, list[str], str]]:
    for family in families:
        names = getattr(family, "_labelnames", None) or (family.samples[0].labels if family.samples else ())
        labels = [f"`{name}`" for name in names if name not in NO_REAL_LABELS]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, labels, family.documentation.replace("|", "\\|")


def with_tables(page: str) -> str:
    """The page, with the tables of now."""
    page = between(page, "router", table(router_metrics().collect()))
    return between(page, "engine", table(engine_metrics().collect()))

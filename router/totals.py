"""One set of metrics for a router of several processes: what each has counted, and what those did that are no more.

Counters and histograms are sums over all processes that there ever were, so they never go down. Gauges are of those
that live. What a process has counted is as it told last: of one that was killed, up to a second before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import orjson
from prometheus_client import CollectorRegistry, Metric

from router.tally import MAX_MODELS, OTHER

SUMMED: Final = ("counter", "histogram")
Rule = Literal["sum", "mean", "least"]
RULES: Final[Mapping[str, Rule]] = {
    "backhaul_router_break_even_tokens": "mean",
    "backhaul_router_engine_ready": "mean",
    "backhaul_router_engine_load": "mean",
    "backhaul_router_engine_state": "mean",
    "backhaul_router_pool_ready_engines": "mean",
    "process_start_time_seconds": "least",
}
"""How gauges of several processes become one. Those that are not here are sums."""


class Sample(NamedTuple):
    name: str
    labels: tuple[tuple[str, str], ...]


class Family(NamedTuple):
    name: str
    kind: str
    help: str
    samples: Mapping[Sample, float]


Snapshot = Mapping[str, Family]


def snapshot(registry: CollectorRegistry) -> bytes:
    """What a process has counted so far, for `read`."""
    return orjson.dumps(
        [
            [one.name, one.type, one.documentation, [[each.name, each.labels, each.value] for each in one.samples]]
            for one in registry.collect()
        ]
    )


def read(data: bytes) -> Snapshot:
    families: list[list[Any]] = orjson.loads(data)
    return {
        name: Family(name, kind, help, {Sample(each, tuple(labels.items())): value for each, labels, value in samples})
        for name, kind, help, samples in families
    }


class Totals:
    """What `prometheus_client.generate_latest` takes for a registry."""

    def __init__(self) -> None:
        self.living: Sequence[Snapshot] = ()
        self._dead: dict[str, Family] = {}
        self._models: set[str] = set()

    def bury(self, last: Snapshot) -> None:
        """A process is no more: what it had counted stays."""
        for family in last.values():
            if family.kind in SUMMED:
                sums = dict(self._dead[family.name].samples) if family.name in self._dead else {}
                for sample, value in family.samples.items():
                    sums[sample] = sums.get(sample, 0.0) + value
                self._dead[family.name] = family._replace(samples=sums)

    def collect(self) -> Iterator[Metric]:
        self._forget_engines()
        names = dict.fromkeys(name for one in (*self.living, self._dead) for name in one)
        for name in names:
            parts = [one[name] for one in (*self.living, self._dead) if name in one]
            metric = Metric(name, parts[0].help, parts[0].kind)
            for sample, value in self._merged(name, parts).items():
                metric.add_sample(sample.name, dict(sample.labels), value)
            yield metric

    def _merged(self, name: str, parts: Sequence[Family]) -> Mapping[Sample, float]:
        values: dict[Sample, list[float]] = {}
        for part in parts:
            for sample, value in part.samples.items():
                values.setdefault(self._admitted(sample), []).append(value)
        match "sum" if parts[0].kind in SUMMED else RULES.get(name, "sum"):
            case "mean":
                return {sample: sum(several) / len(several) for sample, several in values.items()}
            case "least":
                return {sample: min(several) for sample, several in values.items()}
        return {sample: sum(several) for sample, several in values.items()}

    def _admitted(self, sample: Sample) -> Sample:
        """With the name of a model only if it is among the first so many: each process has its own."""
        if not any(label == "model" for label, _ in sample.labels):
            return sample
        return Sample(sample.name, tuple((label, self._model(label, value)) for label, value in sample.labels))

    def _model(self, label: str, value: str) -> str:
        if label != "model" or value in self._models or value == OTHER:
            return value
        if len(self._models) >= MAX_MODELS:
            return OTHER
        self._models.add(value)
        return value

    def _forget_engines(self) -> None:
        """What dead processes had counted of engines that no living one has."""
        there = {engine for one in self.living for family in one.values() for engine in _engines(family)}
        if not there:
            return  # nobody knows of any yet
        for name, family in self._dead.items():
            if not there.issuperset(_engines(family)):
                kept = {one: value for one, value in family.samples.items() if there.issuperset(_engines_of(one))}
                self._dead[name] = family._replace(samples=kept)


def _engines(family: Family) -> Iterator[str]:
    for sample in family.samples:
        yield from _engines_of(sample)


def _engines_of(sample: Sample) -> Iterator[str]:
    return (value for label, value in sample.labels if label == "engine")

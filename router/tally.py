"""Counters and histograms that cost little to count with.

The event loop is the only one that counts and is scraped, so plain numbers do, without the locks of prometheus-client's
own. What is scraped is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from router.names import shown

MAX_MODELS: Final = 100
OTHER: Final = "other"
"""What models beyond so many are counted as."""


class Counts:
    """A counter, one series for each combination of label values."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._family = (name, documentation, labels)
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        registry.register(self)

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Count; `by=0` makes the series known, so that its first increase can be seen."""
        self._values[labels] += by

    def drop(self, *labels: str) -> None:
        """There is no such thing any more, nor its series."""
        self._values.pop(labels, None)

    def collect(self) -> Iterator[CounterMetricFamily]:
        name, documentation, names = self._family
        family = CounterMetricFamily(name, documentation, labels=names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Row:
    """The durations of one series."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Durations:
    """A histogram of seconds, one series for each value of its one label."""

    def __init__(
        self, name: str, documentation: str, label: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets`: their upper bounds, ascending; one without a bound comes after them."""
        self._family = (name, documentation, [label])
        self._names = [*map(floatToGoString, buckets), "+Inf"]
        self._rows: defaultdict[str, Row] = defaultdict(partial(Row, buckets))
        registry.register(self)

    def of(self, label: str) -> Row:
        """One series, for who observes much of it."""
        return self._rows[label]

    def observe(self, label: str, seconds: float) -> None:
        row = self._rows[label]
        row.counts[bisect_left(row.bounds, seconds)] += 1
        row.sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, documentation, names = self._family
        family = HistogramMetricFamily(name, documentation, labels=names)
        for label, row in self._rows.items():
            buckets: list[tuple[str, float]] = []
            total = 0
            for bound, count in zip(self._names, row.counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric([label], buckets=buckets, sum_value=row.sum)
        yield family


class Models:
    """The names of models as label values: those that came first, a limited number of them."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def label(self, model: str) -> str:
        """`model` is one that engines list."""
        model = shown(model)
        label = self._labels.get(model)
        if label is None:
            if len(self._labels) >= MAX_MODELS:
                return OTHER
            label = self._labels[model] = model
        return label

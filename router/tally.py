"""Counters and histograms that cost little to count with.

The event loop is the only one that counts and is scraped, so plain numbers do, without the locks of prometheus-client's
own. What is scraped is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


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


class Durations:
    """A histogram of seconds, one series for each value of its one label."""

    def __init__(
        self, name: str, documentation: str, label: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets`: their upper bounds, ascending; one without a bound comes after them."""
        self._family = (name, documentation, [label])
        self._bounds = buckets
        self._names = [*map(floatToGoString, buckets), "+Inf"]
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(self._names))
        self._sums: defaultdict[str, float] = defaultdict(float)
        registry.register(self)

    def observe(self, label: str, seconds: float) -> None:
        self._counts[label][bisect_left(self._bounds, seconds)] += 1
        self._sums[label] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, documentation, names = self._family
        family = HistogramMetricFamily(name, documentation, labels=names)
        for label, counts in self._counts.items():
            buckets: list[tuple[str, float]] = []
            total = 0
            for bound, count in zip(self._names, counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric([label], buckets=buckets, sum_value=self._sums[label])
        yield family

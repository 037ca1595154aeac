"""What a scrape is told of engines: those that there are now, and none that have left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

from prometheus_client.core import GaugeMetricFamily

from router.member import STATES, Role
from router.pool import Pool

LABELS: Final = ("role", "engine")
POOL_READY: Final = "backhaul_router_pool_ready_engines"


class EngineGauges:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ready = _family("ready", "1 if the engine may be given turns.")
        in_flight = _family("in_flight", "Requests in flight to an engine.")
        load = _family("load", "Requests an engine is working on, others' included, and what a full cache counts as.")
        state = _family("state", "1 for the state an engine is in.", "state")
        for engine in {(one.role, one.name): one for one in self._pool.engines}.values():
            labels = (engine.role, engine.name)
            ready.add_metric(labels, float(engine.ready))
            in_flight.add_metric(labels, engine.in_flight)
            load.add_metric(labels, engine.load)
            for one in STATES:
                if one != "gone":  # whose series are
                    state.add_metric((*labels, one), float(one == engine.state))
        able = GaugeMetricFamily(POOL_READY, "Engines of a pool that may be given turns.", labels=["role"])
        for role in get_args(Role):
            if self._pool.has(role):
                able.add_metric([role], sum(one.ready for one in self._pool.of(role)))
        yield from (ready, in_flight, load, state, able)


def _family(name: str, words: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"backhaul_router_engine_{name}", words, labels=[*LABELS, *more])

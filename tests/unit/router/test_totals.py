"""Metrics of several processes as those of one."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from router.tally import Counts, Durations
from router.totals import Snapshot, Totals, read, snapshot


def told(
    turns: float = 0,
    *,
    in_flight: float = 0,
    ready: Mapping[str, float] | None = None,
    capped: str = "",
    started: float = 9,
) -> Snapshot:
    """What a process tells that has counted so much."""
    registry = CollectorRegistry()
    Counts("turns", "Turns.", [], registry=registry).add(by=turns)
    seconds = Durations("seconds", "Seconds.", "leg", buckets=(1.0, 2.0), registry=registry)
    for _ in range(int(turns)):
        seconds.observe("decode", 1.5)
    Gauge("in_flight", "In flight.", registry=registry).set(in_flight)
    Gauge("process_start_time_seconds", "Start.", registry=registry).set(started)
    known = Gauge("backhaul_router_engine_ready", "Ready.", ["engine"], registry=registry)
    for engine, value in (ready or {}).items():
        known.labels(engine).set(value)
    if capped:
        Counts("capped", "Capped.", ["engine"], registry=registry).add(capped)
    return read(snapshot(registry))


def values(totals: Totals) -> dict[str, float]:
    lines = generate_latest(totals).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_counters_and_histograms_are_summed() -> None:
    totals = Totals()
    totals.living = [told(2), told(3)]
    sums = values(totals)
    assert sums["turns_total"] == 5
    assert sums['seconds_bucket{le="1.0",leg="decode"}'] == 0
    assert sums['seconds_bucket{le="2.0",leg="decode"}'] == 5
    assert sums['seconds_count{leg="decode"}'] == 5
    assert sums['seconds_sum{leg="decode"}'] == 7.5


def test_gauges_are_summed_averaged_or_the_least_as_they_mean() -> None:
    totals = Totals()
    totals.living = [told(in_flight=2, ready={"a": 1, "b": 1}, started=7), told(in_flight=1, ready={"a": 0}, started=8)]
    sums = values(totals)
    assert sums["in_flight"] == 3
    assert sums['backhaul_router_engine_ready{engine="a"}'] == 0.5
    assert sums['backhaul_router_engine_ready{engine="b"}'] == 1
    assert sums["process_start_time_seconds"] == 7


def test_dead_processes_leave_what_they_counted_and_nothing_else() -> None:
    totals = Totals()
    totals.bury(told(4, in_flight=5, ready={"a": 1}))
    totals.bury(told(1))
    totals.living = [told(2, in_flight=1, ready={"b": 1})]
    sums = values(totals)
    assert sums["turns_total"] == 7
    assert sums['seconds_count{leg="decode"}'] == 7
    assert sums["in_flight"] == 1
    assert 'backhaul_router_engine_ready{engine="a"}' not in sums


def test_counts_of_an_engine_go_with_the_engine() -> None:
    totals = Totals()
    totals.bury(told(capped="a"))
    totals.living = [told(ready={"a": 1})]
    assert values(totals)['capped_total{engine="a"}'] == 1
    totals.living = [told()]  # which does not know of any engine yet
    assert values(totals)['capped_total{engine="a"}'] == 1
    totals.living = [told(ready={"b": 1})]
    assert 'capped_total{engine="a"}' not in values(totals)
    totals.living = [told(ready={"a": 1})]
    assert 'capped_total{engine="a"}' not in values(totals)


def test_all_of_it_is_there_while_no_process_lives() -> None:
    totals = Totals()
    totals.bury(told(4))
    assert values(totals)["turns_total"] == 4

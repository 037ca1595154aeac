"""What `bench.router` has measured, and its tables."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.router_parts import Load, SideName
from bench.stack import provenance

GOAL: Final = 0.6
SIDES: Final[tuple[SideName, ...]] = ("backhaul", "passthrough")
ENGINES: Final = ("prefill engine", "decode engine")
LABEL_VALUE: Final = re.compile(r'"([^"]*)"')
LEAST_SPENT: Final = 0.01
"""Seconds; processor time is told in hundredths."""


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one side."""

    case: str
    side: SideName
    load: Load
    cpu_seconds: float

    @property
    def per_core_second(self) -> float:
        return self.load.good / max(self.cpu_seconds, LEAST_SPENT)

    @property
    def per_second(self) -> float:
        return self.load.good / self.load.seconds

    @property
    def events_per_core_second(self) -> float:
        return self.load.events / max(self.cpu_seconds, LEAST_SPENT)


@dataclass(frozen=True, slots=True)
class Latency:
    """At a low rate: through each side, and of each engine asked directly."""

    whole: Mapping[str, Load]
    streams: Mapping[str, Load]


def print_report(
    cases: Mapping[str, str],
    runs: Sequence[Run],
    latencies: Sequence[Latency],
    counters: Mapping[str, float],
) -> None:
    """`cases`: what each is, by its name."""
    print(provenance())
    print("\nturns per second of one core, medians (and extremes) of the rounds\n")
    heads = ["", "Backhaul /core-s", "pass-through /core-s", "Backhaul /s", "pass-through /s", "ratio"]
    print_table(heads, [_row(cases[case], [run for run in runs if run.case == case]) for case in cases])
    for case in cases:
        if streamed := [run for run in runs if run.case == case and run.load.events]:
            told = (
                f"{side} " + spread([run.events_per_core_second for run in streamed if run.side == side], "{:,.0f}")
                for side in SIDES
            )
            print(f"\n{cases[case]}: events per second of one core: {', '.join(told)}")
    if latencies:
        print("\nlatency at a low rate, ms, medians of the rounds\n")
        heads = ["", "Backhaul p50", "p99", "pass-through p50", "p99", "engines p50", "added p50", "added p99"]
        whole, streams = ([getattr(one, kind) for one in latencies] for kind in ("whole", "streams"))
        rows = [
            _latency_row("answer in one piece", whole, "p50_ms", "p99_ms"),
            _latency_row("first byte of a stream", streams, "first_p50_ms", "first_p99_ms"),
        ]
        print_table(heads, rows)
    print("\n" + "\n".join(_what_it_did(counters)))


def _row(what: str, runs: Sequence[Run]) -> list[str]:
    ours, other = ([run for run in runs if run.side == side] for side in SIDES)
    ratios = [a.per_core_second / b.per_core_second for a, b in zip(ours, other, strict=True) if b.load.good]
    return [
        what,
        *(spread([run.per_core_second for run in side], "{:,.0f}") for side in (ours, other)),
        *(f"{statistics.median(run.per_second for run in side):,.0f}" for side in (ours, other)),
        spread(ratios, "{:.2f}"),
    ]


def _latency_row(what: str, taken: Sequence[Mapping[str, Load]], p50: str, p99: str) -> list[str]:
    def middle(name: str, key: str) -> float:
        values: list[float] = [getattr(loads[name], key) for loads in taken]
        return statistics.median(values)

    engines = [sum(middle(engine, key) for engine in ENGINES) for key in (p50, p99)]
    sides = [middle(side, key) for side in SIDES for key in (p50, p99)]
    numbers = [*sides, engines[0], sides[0] - engines[0], sides[1] - engines[1]]
    return [what, *(f"{number:.2f}" for number in numbers)]


def _what_it_did(counters: Mapping[str, float]) -> Iterator[str]:
    """The router's own counters: that it did the whole of its work, and nothing failed."""
    for title, series in (
        ("plans", "plans_total"),
        ("store", "store_operations_total"),
        ("failed legs", "leg_failures_total"),
        ("turns", "turns_total"),
        ("tokenizations", "tokenizations_total"),
    ):
        found = [
            f"{'/'.join(LABEL_VALUE.findall(key))} {count:,.0f}"
            for key, count in counters.items()
            if key.startswith(f"backhaul_router_{series}{{") and count
        ]
        yield f"{title}: {', '.join(found) or 'none'}"


def spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low}-{high})"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [heads, ["---", *("---:" for _ in heads[1:])], *rows]
    for line in lines:
        print("| " + " | ".join(line) + " |")

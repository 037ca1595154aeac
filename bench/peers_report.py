"""What `bench.peers` has measured, its tables, and the goals they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.peers_parts import BACKHAUL, DECODE_ENGINE, PREFILL_ENGINE, VLLM_ROUTER
from bench.router_parts import Load
from bench.router_report import LEAST_SPENT, print_table, spread


@dataclass(frozen=True, slots=True)
class Sample:
    """One load on one router, or on an engine asked directly, of which neither time nor memory is taken."""

    section: str
    case: str
    side: str
    load: Load
    cpu_seconds: float = 0.0
    rss_mib: float = 0.0
    """The most it had meanwhile."""

    @property
    def per_second(self) -> float:
        return self.load.good / self.load.seconds

    @property
    def per_core_second(self) -> float:
        return self.load.good / max(self.cpu_seconds, LEAST_SPENT)

    @property
    def events_per_second(self) -> float:
        return self.load.events / self.load.event_seconds if self.load.event_seconds else 0.0

    @property
    def cpu_us_per_event(self) -> float:
        return 1e6 * self.cpu_seconds / max(self.load.events, 1)


Figure = Callable[[Sample], float]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted of a figure, and what it must not fall behind."""

    what: str
    wanted: float
    floor: float | None = None
    at_most: bool = False

    def verdict(self, value: float) -> str:
        sign = "at most" if self.at_most else "at least"
        floor = "" if self.floor is None else f" (floor {self.floor:,g})"
        if self._holds(value, self.wanted):
            came_of_it = "met"
        else:
            came_of_it = "missed" if self.floor is None or not self._holds(value, self.floor) else "missed, floor holds"
        return f"{self.what}: {value:,.2f}, goal {sign} {self.wanted:,g}{floor}: {came_of_it}"

    def _holds(self, value: float, bound: float) -> bool:
        return value <= bound if self.at_most else value >= bound


RATIO: Final = {
    "off": Goal("of vllm-router's turns, state off, small body", 1.3, 1.0),
    "on": Goal("of vllm-router's turns, state on, small body", 1.1, 0.8),
    "later": Goal("of vllm-router's turns, state on, later turns", 1.1, 0.8),
    "off-30k": Goal("of vllm-router's turns, state off, body of 30 KB", 1.3, 1.0),
    "on-30k": Goal("of vllm-router's turns, state on, body of 30 KB", 1.1, 0.8),
}
ADDED: Final = (
    Goal("added p50, ms", 0.9, 1.3, at_most=True),
    Goal("added p99, ms", 1.5, 2.5, at_most=True),
)
ADDED_BY_STATE: Final = Goal("p50 of completions with state over those without, ms", 0.2, at_most=True)
EVENTS: Final = Goal("events/s", 60_000)
GAP: Final = Goal("gap p99, ms", 2.5, at_most=True)
OPEN: Final = Goal("MiB with the streams open", 80, 120, at_most=True)
IDLE: Final = Goal("MiB idle", 50, at_most=True)
PROCESSES: Final = 1.75
FLAT: Final = Goal("drift, per cent", 5, at_most=True)


def print_report(samples: Sequence[Sample], idle_mib: Mapping[str, float]) -> None:
    """Medians (and extremes) of the rounds."""
    by_section: dict[str, list[Sample]] = {}
    for sample in samples:
        by_section.setdefault(sample.section, []).append(sample)
    for section, taken in by_section.items():
        print(f"\n### {section}\n")
        if section == "saturation":
            _saturation(taken)
        elif section == "latency":
            _latency(taken)
        elif section == "open":
            _open(taken, idle_mib)
        elif section == "processes":
            _processes(taken)
        elif section == "soak":
            _soak(taken)
        else:
            _streams(taken, offered=section.endswith("-1ms"))


def _saturation(samples: Sequence[Sample]) -> None:
    heads = ["", "router", "turns/s", "turns/core-s", "CPU s per 1,000", "p50 ms", "p99 ms", "MiB", "of vllm-router"]
    rows: list[list[str]] = []
    verdicts: list[str] = []
    for case, side, taken in _grouped(samples):
        ratios = _ratios(taken, _of(samples, case, VLLM_ROUTER), lambda one: one.per_core_second)
        rows.append([case, side, *_speed(taken), spread(ratios, "{:.2f}")])
        if side == BACKHAUL and ratios:
            verdicts.append(RATIO[case].verdict(statistics.median(ratios)))
    _print(heads, rows, verdicts)


def _processes(samples: Sequence[Sample]) -> None:
    heads = ["", "processes", "turns/s", "turns/core-s", "CPU s per 1,000", "p50 ms", "p99 ms", "MiB", "turns/s of one"]
    one_process = samples[0].side
    rows: list[list[str]] = []
    verdicts: list[str] = []
    for case, side, taken in _grouped(samples):
        ratios = _ratios(taken, _of(samples, case, one_process), lambda one: one.per_second)
        rows.append([case, side, *_speed(taken), spread(ratios, "{:.2f}")])
        if side != one_process:
            verdicts.append(Goal(f"of the turns of one process, {case}", PROCESSES).verdict(statistics.median(ratios)))
    _print(heads, rows, verdicts)


def _speed(taken: Sequence[Sample]) -> list[str]:
    return [
        spread([one.per_second for one in taken], "{:,.0f}"),
        spread([one.per_core_second for one in taken], "{:,.0f}"),
        f"{1000 / _median(taken, lambda one: one.per_core_second):.3f}",
        f"{_median(taken, lambda one: one.load.p50_ms):.1f}",
        f"{_median(taken, lambda one: one.load.p99_ms):.1f}",
        f"{_median(taken, lambda one: one.rss_mib):.0f}",
    ]


def _latency(samples: Sequence[Sample]) -> None:
    heads = ["", "router", "p50 ms", "p99 ms", "added p50", "added p99"]
    percentiles: tuple[Figure, ...] = (lambda one: one.load.p50_ms, lambda one: one.load.p99_ms)
    direct = [[one for one in samples if one.side == engine] for engine in (PREFILL_ENGINE, DECODE_ENGINE)]
    engines = [sum(_median(taken, figure) for taken in direct) for figure in percentiles]
    rows: list[list[str]] = []
    verdicts: list[str] = []
    p50s: dict[str, float] = {}
    for case, side, taken in _grouped(samples):
        found = [_median(taken, figure) for figure in percentiles]
        if side in (PREFILL_ENGINE, DECODE_ENGINE):
            rows.append([case, f"{side}, asked directly", *(f"{value:.2f}" for value in found), "", ""])
            continue
        added = [value - engine for value, engine in zip(found, engines, strict=True)]
        rows.append([case, side, *(f"{value:.2f}" for value in (*found, *added))])
        if side == BACKHAUL:
            p50s[case] = found[0]
            verdicts += [f"state {case}: {goal.verdict(value)}" for goal, value in zip(ADDED, added, strict=True)]
    verdicts.append(ADDED_BY_STATE.verdict(p50s["kept"] - p50s["off"]))
    _print(heads, rows, verdicts)


def _streams(samples: Sequence[Sample], *, offered: bool) -> None:
    """`offered`: so many events that not every router can pass them on in time."""
    heads = ["", "events/s", "gap p50 ms", "gap p99 ms", "CPU us/event", "first byte p50 ms", "MiB"]
    rows: list[list[str]] = []
    verdicts: list[str] = []
    for _, side, taken in _grouped(samples):
        rows.append(
            [
                side,
                spread([one.events_per_second for one in taken], "{:,.0f}"),
                f"{_median(taken, lambda one: one.load.gap_p50_ms):.2f}",
                spread([one.load.gap_p99_ms for one in taken], "{:.2f}"),
                f"{_median(taken, lambda one: one.cpu_us_per_event):.1f}",
                f"{_median(taken, lambda one: one.load.first_p50_ms):.1f}",
                f"{_median(taken, lambda one: one.rss_mib):.0f}",
            ]
        )
        if side == BACKHAUL and offered:
            verdicts.append(EVENTS.verdict(_median(taken, lambda one: one.events_per_second)))
            verdicts.append(GAP.verdict(_median(taken, lambda one: one.load.gap_p99_ms)))
    _print(heads, rows, verdicts)


def _open(samples: Sequence[Sample], idle_mib: Mapping[str, float]) -> None:
    """A stream that keeps up has as much time between its events as the engine leaves."""
    heads = ["", "MiB idle", "MiB with streams", "events/s", "mean gap ms", "gap p99 ms", "first byte p99 ms", "cut"]
    rows = [
        [
            one.side,
            f"{idle_mib[one.side]:.0f}",
            f"{one.rss_mib:.0f}",
            f"{one.events_per_second:,.0f}",
            f"{one.load.gap_mean_ms:.1f}",
            f"{one.load.gap_p99_ms:.1f}",
            f"{one.load.first_p99_ms:,.0f}",
            f"{one.load.bad}",
        ]
        for one in samples
    ]
    ours = next(one for one in samples if one.side == BACKHAUL)
    _print(heads, rows, [IDLE.verdict(idle_mib[BACKHAUL]), OPEN.verdict(ours.rss_mib)])


def _soak(samples: Sequence[Sample]) -> None:
    heads = ["from s", "turns/s", "turns/core-s", "p99 ms", "MiB"]
    rows: list[list[str]] = []
    started = 0.0
    for one in samples:
        numbers = (started, one.per_second, one.per_core_second)
        rows.append([*(f"{value:,.0f}" for value in numbers), f"{one.load.p99_ms:.1f}", f"{one.rss_mib:.1f}"])
        started += one.load.seconds
    figures: dict[str, Figure] = {
        "turns/s": lambda one: one.per_second,
        "turns/core-s": lambda one: one.per_core_second,
        "MiB": lambda one: one.rss_mib,
    }
    third = max(len(samples) // 3, 1)
    verdicts: list[str] = []
    for what, figure in figures.items():
        first, last = (statistics.fmean(figure(one) for one in part) for part in (samples[:third], samples[-third:]))
        drift = 100 * (last / first - 1)
        verdicts.append(
            f"{what}, first third {first:,.1f}, last {last:,.1f} ({drift:+.1f} %): {FLAT.verdict(abs(drift))}"
        )
    _print(heads, rows, verdicts)


def _grouped(samples: Sequence[Sample]) -> Iterator[tuple[str, str, list[Sample]]]:
    """Those of each case and side, in the order in which these first came."""
    for case in dict.fromkeys(one.case for one in samples):
        for side in sorted({one.side for one in samples if one.case == case}):
            yield case, side, _of(samples, case, side)


def _of(samples: Sequence[Sample], case: str, side: str) -> list[Sample]:
    return [one for one in samples if (one.case, one.side) == (case, side)]


def _ratios(ours: Sequence[Sample], theirs: Sequence[Sample], figure: Figure) -> list[float]:
    """Round by round; none if the other did not take part."""
    return [figure(one) / figure(other) for one, other in zip(ours, theirs, strict=False) if other.load.good]


def _median(taken: Sequence[Sample], figure: Figure) -> float:
    return statistics.median(figure(one) for one in taken)


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]], verdicts: Sequence[str]) -> None:
    print_table(heads, rows)
    print("\n" + "\n".join(f"- {verdict}" for verdict in verdicts))

"""The bench beside other routers: goals, turns, and the tables of what was measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers_parts import BACKHAUL, DECODE_ENGINE, PREFILL_ENGINE, VLLM_ROUTER, Peer
from bench.peers_report import Goal, Sample, print_report
from bench.router_parts import Load

LOAD = Load(
    seconds=2.0,
    good=1000,
    bad=0,
    events=0,
    event_seconds=0.0,
    p50_ms=3.0,
    p99_ms=5.0,
    first_p50_ms=3.0,
    first_p99_ms=5.0,
    gap_p50_ms=0.0,
    gap_p99_ms=0.0,
    gap_mean_ms=0.0,
)


@pytest.mark.parametrize(
    ("value", "came_of_it"), [(1.2, "met"), (1.1, "met"), (0.9, "missed, floor holds"), (0.7, "missed")]
)
def test_verdict_says_whether_goal_and_floor_hold(value: float, came_of_it: str) -> None:
    assert Goal("ratio", 1.1, 0.8).verdict(value) == f"ratio: {value:.2f}, goal at least 1.1 (floor 0.8): {came_of_it}"


def test_verdict_of_what_is_to_be_little_says_at_most() -> None:
    assert Goal("idle", 50, at_most=True).verdict(51) == "idle: 51.00, goal at most 50: missed"


def test_ratio_is_that_of_processor_time_in_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [
        Sample("saturation", "on", BACKHAUL, LOAD, cpu_seconds=2.0),
        Sample("saturation", "on", VLLM_ROUTER, LOAD, cpu_seconds=1.0),
        Sample("saturation", "on", VLLM_ROUTER, LOAD, cpu_seconds=2.0),
        Sample("saturation", "on", BACKHAUL, LOAD, cpu_seconds=1.0),
    ]
    print_report(samples, {})
    told = capsys.readouterr().out
    assert "1.25 (0.50-2.00)" in told
    assert "of vllm-router's turns, state on, small body: 1.25, goal at least 1.1 (floor 0.8): met" in told


def test_added_is_what_is_more_than_both_engines_take(capsys: pytest.CaptureFixture[str]) -> None:
    engine = replace(LOAD, p50_ms=0.5, p99_ms=1.0)
    samples = [
        *(Sample("latency", "off", name, engine) for name in (PREFILL_ENGINE, DECODE_ENGINE)),
        Sample("latency", "off", BACKHAUL, LOAD),
        Sample("latency", "kept", BACKHAUL, replace(LOAD, p50_ms=3.1)),
    ]
    print_report(samples, {})
    told = capsys.readouterr().out
    assert "| off | Backhaul | 3.00 | 5.00 | 2.00 | 3.00 |" in told
    assert "p50 of completions with state over those without, ms: 0.10, goal at most 0.2: met" in told


def test_an_environment_without_its_router_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(SystemExit, match=f"{tmp_path} has no vllm-router: pip install it there"):
        Peer(VLLM_ROUTER, tmp_path).version()

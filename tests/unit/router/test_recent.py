"""What is kept of the turns that have ended: bounded, and without anything of whose they were."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

import pytest

from router.recent import BUCKET_SECONDS, NUM_BUCKETS, NUM_TURNS, Recent, sources
from router.report import Report


@dataclass
class Clock:
    now: float = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


def turn(**fields: object) -> Report:
    report = Report("the-id", "chat", model="m", decode="http://user:s3cret@d:1", outcome="ok")
    for name, value in fields.items():
        setattr(report, name, value)
    return report


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (turn(), {}),
        (turn(prompt_tokens=10), {"unknown": 10}),
        (turn(prompt_tokens=10, cached_tokens=4), {"decode_cached": 4, "decode_computed": 6}),
        (
            turn(prefill="p", prompt_tokens=10, cached_tokens=4, pulled_tokens=5),
            {"cached": 4, "pulled": 5, "computed": 1},
        ),
        (turn(prefill="p", prompt_tokens=10, cached_tokens=4), {"cached": 4, "pulled": 0, "computed": 6}),
    ],
)
def test_each_prompt_token_has_one_source(report: Report, told: dict[str, int]) -> None:
    assert dict(sources(report)) == told
    assert sum(told.values()) == (report.prompt_tokens or 0)


def test_turns_are_added_up_by_the_seconds_they_ended_in() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.add(turn(prompt_tokens=10, cached_tokens=4, completion_tokens=3), 0.5)
    recent.add(turn(prompt_tokens=1, cached_tokens=0, outcome="cut"), 0.5)
    clock.now += BUCKET_SECONDS
    recent.add(turn(outcome="rejected"), 0.5)
    clock.now -= 2 * BUCKET_SECONDS  # somebody sets the clock
    recent.add(turn(), 0.5)
    clock.now += 2 * BUCKET_SECONDS
    at = int(clock.now) // BUCKET_SECONDS * BUCKET_SECONDS - BUCKET_SECONDS
    assert recent.describe()["buckets"] == [
        {"at": at, "turns": 2, "faults": 1, "completion": 3, "tokens": {"decode_cached": 4, "decode_computed": 7}},
        {"at": at + BUCKET_SECONDS, "turns": 2, "tokens": {}},
    ]


def test_what_is_old_goes() -> None:
    clock = Clock()
    recent = Recent(clock)
    for _ in range(2 * NUM_BUCKETS):
        recent.add(turn(), 0.1)
        clock.now += BUCKET_SECONDS
    told = recent.describe()
    assert len(told["turns"]) == NUM_TURNS
    assert len(told["buckets"]) == NUM_BUCKETS
    clock.now += NUM_BUCKETS * BUCKET_SECONDS
    assert recent.describe()["buckets"] == []


def test_a_turn_is_told_without_its_id_or_a_password() -> None:
    recent = Recent(Clock())
    report = turn(trace_id="the-trace", prompt_tokens=3, phases=defaultdict(float, decode=0.25))
    recent.add(report, 0.5)
    told = recent.describe()
    text = json.dumps(told)
    assert "the-id" not in text
    assert "s3cret" not in text
    assert "the-trace" not in text
    (one,) = told["turns"]
    assert (one["decode"], one["ms"], one["phases_ms"], one["tokens"]) == (
        "http://d:1",
        500.0,
        {"decode": 250.0},
        {"prompt": 3},
    )

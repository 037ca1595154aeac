"""What turns did of late: the last of them one by one, and a quarter of an hour of prompt tokens by where their KV came
from.

Kept in memory by each process, in bounds, and gone with it: metrics are for what is to be kept. Nothing in it comes
from a prompt or an answer, or says whose the turn was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from router.report import Report
from router.statement import without_user

Json = dict[str, Any]

BUCKET_SECONDS: Final = 5
NUM_BUCKETS: Final = 180
"""A quarter of an hour."""
NUM_TURNS: Final = 100

SOURCES: Final = ("cached", "pulled", "computed", "decode_cached", "decode_computed", "unknown")
"""Where the KV of prompt tokens came from: the prefill engine's own cache; pulled by it from the decode engine of the
last turn; computed by it; the same two of decode engines that were left alone with a prompt; not told."""


class Finished(NamedTuple):
    """A turn that has ended."""

    at: float
    """Wall clock."""
    seconds: float
    report: Report


@dataclass(slots=True)
class Bucket:
    """The turns that ended in some seconds."""

    at: int
    """When they begin, wall clock."""
    turns: int = 0
    faults: int = 0
    """Of those, failed or cut."""
    completion: int = 0
    """Tokens."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by source."""


class Recent:
    """Told of each turn as it ends."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._turns: deque[Finished] = deque(maxlen=NUM_TURNS)
        self._buckets: deque[Bucket] = deque(maxlen=NUM_BUCKETS)

    def add(self, report: Report, seconds: float) -> None:
        now = self._clock()
        self._turns.append(Finished(now, seconds, report))
        at = int(now) // BUCKET_SECONDS * BUCKET_SECONDS
        if self._buckets and self._buckets[-1].at >= at:  # also if the clock was set back
            bucket = self._buckets[-1]
        else:
            bucket = Bucket(at)
            self._buckets.append(bucket)
        bucket.turns += 1
        bucket.faults += report.outcome in ("failed", "cut")
        bucket.completion += report.completion_tokens or 0
        tokens = bucket.tokens
        for source, count in sources(report):
            tokens[source] = tokens.get(source, 0) + count

    def describe(self) -> Json:
        """What there is of the last quarter of an hour; seconds in which no turn ended are left out."""
        since = self._clock() - NUM_BUCKETS * BUCKET_SECONDS
        return {
            "bucket_seconds": BUCKET_SECONDS,
            "buckets": [_bucket(one) for one in self._buckets if one.at >= since],
            "turns": [_turn(one) for one in reversed(self._turns)],
        }


def sources(report: Report) -> tuple[tuple[str, int], ...]:
    """The prompt tokens of a turn, by source."""
    prompt, cached, computed = report.prompt_tokens, report.cached_tokens, report.computed_tokens
    if not prompt:
        return ()
    if cached is None or computed is None:
        return (("unknown", prompt),)
    if report.prefill is None:
        return (("decode_cached", cached), ("decode_computed", computed))
    return (("cached", cached), ("pulled", report.pulled_tokens or 0), ("computed", computed))


def _bucket(bucket: Bucket) -> Json:
    tokens = {source: count for source, count in bucket.tokens.items() if count}
    told = {"at": bucket.at, "turns": bucket.turns, "faults": bucket.faults, "completion": bucket.completion}
    return {**{name: value for name, value in told.items() if value}, "tokens": tokens}


def _turn(finished: Finished) -> Json:
    at, seconds, report = finished
    kinds = {
        "prompt": report.prompt_tokens,
        "cached": report.cached_tokens,
        "pulled": report.pulled_tokens,
        "computed": report.computed_tokens,
        "completion": report.completion_tokens,
    }
    return {
        "at": round(at, 3),
        "endpoint": report.endpoint,
        "model": report.model,
        "outcome": report.outcome,
        "status": report.status,
        "turn": report.turn,
        "attempts": report.attempts,
        "plan": report.reason,
        "kv": report.kv,
        "prefill": report.prefill and without_user(report.prefill),
        "decode": report.decode and without_user(report.decode),
        "handoff": report.handoff,
        "tokens": {kind: count for kind, count in kinds.items() if count is not None},
        "ms": _ms(seconds),
        "first_byte_ms": None if report.first_byte is None else _ms(report.first_byte),
        "phases_ms": {phase: _ms(seconds) for phase, seconds in report.phases.items()},
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)

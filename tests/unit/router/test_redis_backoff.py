from __future__ import annotations

from router.redis_backoff import CALM_SECONDS, MAX_SECONDS, Backoff


def test_first_failure_costs_no_wait_and_further_ones_more_and_more_up_to_a_second() -> None:
    backoff, now, waits = Backoff(), 100.0, []
    for _ in range(40):
        backoff.failed(now)
        waits.append(max(0.0, backoff.until - now))
        now = max(now, backoff.until)
    assert waits[0] == 0
    assert 0 < waits[1] < 0.06
    assert all(wait < later for wait, later in zip(waits[:4:2], waits[2:6:2], strict=True))
    assert all(MAX_SECONDS / 2 <= wait <= MAX_SECONDS for wait in waits[7:])
    assert len(set(waits[7:])) > 1, "not all at the same time"


def test_failure_after_a_calm_time_is_a_first_one() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.failed(100.0)
    backoff.failed(100.0 + CALM_SECONDS)
    assert backoff.until < 100.0 + CALM_SECONDS

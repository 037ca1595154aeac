"""How often turns may be tried again."""

from __future__ import annotations

import asyncio

import pytest

from router import budget
from router.budget import RetryBudget


@pytest.fixture
async def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0], raising=False)
    return now


def spend_all(retries: RetryBudget) -> int:
    count = 0
    while retries.spend():
        count += 1
    return count


async def test_share_of_turns_may_be_tried_again(now: list[float]) -> None:
    retries = RetryBudget(0.2)
    spend_all(retries)
    for _ in range(50):
        retries.deposit()
    assert spend_all(retries) == 10


async def test_a_few_always_may(now: list[float]) -> None:
    retries = RetryBudget(0.0)
    assert spend_all(retries) == budget.FIRST
    now[0] += 5.0
    assert spend_all(retries) == 5 * budget.LEAST_PER_SECOND


async def test_what_is_saved_is_bounded(now: list[float]) -> None:
    retries = RetryBudget(1.0)
    for _ in range(10_000):
        retries.deposit()
    now[0] += 10_000
    assert spend_all(retries) <= budget.MOST_SAVED

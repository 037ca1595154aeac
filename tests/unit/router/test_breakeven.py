"""How many new tokens are left to the decode engine."""

from __future__ import annotations

import random

import pytest

from router.breakeven import MOST, UNMEASURED, BreakEven


def measured(legs: list[tuple[int, float]]) -> BreakEven:
    break_even = BreakEven()
    for num_computed, seconds in legs:
        break_even.observe(num_computed, seconds)
    return break_even


def test_fixed_part_over_part_per_token() -> None:
    chooser = random.Random(1)
    lengths = [chooser.randrange(10, 2000) for _ in range(100)]
    break_even = measured([(n, 0.030 + 0.001 * n + chooser.gauss(0, 0.002)) for n in lengths])
    assert break_even.tokens == pytest.approx(30, abs=4)


def test_follows_a_network_that_gets_slower() -> None:
    chooser = random.Random(2)
    lengths = [chooser.randrange(10, 2000) for _ in range(600)]
    legs = [(n, (0.010 if i < 300 else 0.200) + 0.001 * n) for i, n in enumerate(lengths)]
    assert measured(legs[:300]).tokens == pytest.approx(10, abs=2)
    assert measured(legs).tokens == pytest.approx(200, abs=10)


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([], id="none yet"),
        pytest.param([(100, 0.1), (200, 0.2)], id="too few"),
        pytest.param([(100, 0.1)] * 50, id="all of one length"),
        pytest.param([(n, 1.0 - n / 1000) for n in range(50)], id="longer ones were faster"),
    ],
)
def test_without_a_measure(legs: list[tuple[int, float]]) -> None:
    assert measured(legs).tokens == UNMEASURED


def test_limits() -> None:
    assert measured([(n, 60.0 + 0.0001 * n) for n in range(50)]).tokens == MOST
    assert measured([(n, 0.0001 + 0.01 * n) for n in range(1, 50)]).tokens == 0


def test_fixed_by_the_settings() -> None:
    break_even = BreakEven(5)
    break_even.observe(1, 100.0)
    assert break_even.tokens == 5

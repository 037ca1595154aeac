"""Which engines a turn gets, as tables."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from connectors.wire.openai import APIError
from router.plan import KV_REASONS, REASONS, Facts, Plan
from router.verify import Why
from tests.unit.router.candidates import EngineView, plan_over

M = frozenset({"m"})


make_plan = partial(plan_over, draw=random.Random(7))


def up(url: str, load: float = 0, last: int = 0, *, models: frozenset[str] = M) -> EngineView:
    return EngineView(url, True, models, load, last)


def down(url: str, *, models: frozenset[str] = M) -> EngineView:
    return EngineView(url, False, models, readable=False)


def engines(plan: Plan) -> tuple[str | None, str, str]:
    return plan.prefill, plan.decode, plan.reason


@pytest.mark.parametrize(
    ("facts", "prefill", "decode", "expected"),
    [
        pytest.param(Facts("m"), [up("p1")], [up("d1")], ("p1", "d1", "new"), id="only one of each"),
        pytest.param(
            Facts("m"), [up("p1", 2), up("p2", 1)], [up("d1", 1), up("d2")], ("p2", "d2", "new"), id="least busy"
        ),
        pytest.param(
            Facts("m"),
            [up("p1", 0, 9), up("p2", 0, 8)],
            [up("d1", 0, 1), up("d2", 0, 2)],
            ("p2", "d1", "new"),
            id="idle ones in turn",
        ),
        pytest.param(
            Facts("m"),
            [down("p1"), up("p2", 9)],
            [down("d1"), up("d2", 9)],
            ("p2", "d2", "new"),
            id="only the ready",
        ),
        pytest.param(
            Facts("m", last_prefill="p2", last_decode="d2"),
            [up("p1"), up("p2", 4)],
            [up("d1"), up("d2", 4)],
            ("p2", "d2", "affinity"),
            id="stays on its engines while they are not much busier",
        ),
        pytest.param(
            Facts("m", last_prefill="p2", last_decode="d2"),
            [up("p1"), up("p2", 5)],
            [up("d1"), up("d2", 5)],
            ("p1", "d1", "spill"),
            id="leaves them when they are",
        ),
        pytest.param(
            Facts("m", last_prefill="p2", last_decode="d2"),
            [up("p1"), down("p2")],
            [up("d1"), down("d2")],
            ("p1", "d1", "moved"),
            id="leaves them when they are down",
        ),
        pytest.param(
            Facts("m", alone="several_choices"),
            [down("p1")],
            [up("d1")],
            (None, "d1", "several_choices"),
            id="decode engine alone needs no prefill engine",
        ),
        pytest.param(Facts("m"), [], [up("d1")], (None, "d1", "no_prefill_pool"), id="no prefill pool"),
        pytest.param(
            Facts("a"),
            [up("p1"), up("p2", 5, models=frozenset({"m", "a"}))],
            [up("d1"), up("d2", 5, models=frozenset({"a"}))],
            ("p2", "d2", "new"),
            id="only engines that serve the model",
        ),
    ],
)
def test_plan(
    facts: Facts, prefill: list[EngineView], decode: list[EngineView], expected: tuple[str | None, str, str]
) -> None:
    assert engines(make_plan(facts, prefill, decode, has_prefill=bool(prefill))) == expected


def test_engines_that_just_failed_are_avoided() -> None:
    facts = Facts("m", last_prefill="p1", last_decode="d1")
    avoid = {"p1", "d1"}
    made = make_plan(facts, [up("p1"), up("p2", 9)], [up("d1"), up("d2", 9)], avoid=avoid)
    assert engines(made) == ("p2", "d2", "moved")


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "words"),
    [
        pytest.param([down("p", models=frozenset())], [down("d", models=frozenset())], 503, "ready yet", id="none yet"),
        pytest.param([up("p", models=frozenset("x"))], [down("d", models=frozenset())], 503, "ready yet", id="only P"),
        pytest.param([up("p")], [down("d")], 503, "No decode engine", id="decode down"),
        pytest.param([down("p")], [up("d")], 503, "No prefill engine", id="prefill down"),
        pytest.param([up("p", models=frozenset())], [up("d")], 503, "No prefill engine", id="prefill without it"),
        pytest.param([up("p", models=frozenset("x"))], [up("d", models=frozenset("x"))], 404, "`m`", id="unknown"),
        pytest.param([down("p", models=frozenset("x"))], [up("d", models=frozenset("x"))], 404, "`m`", id="unknown2"),
    ],
)
def test_no_plan(prefill: list[EngineView], decode: list[EngineView], status: int, words: str) -> None:
    with pytest.raises(APIError) as refused:
        make_plan(Facts("m"), prefill, decode)
    assert refused.value.status == status
    assert words in refused.value.message
    assert ("Retry-After" in refused.value.headers) == (status == 503)


def test_decode_engine_prefills_when_no_prefill_engine_is_left_and_that_is_wanted() -> None:
    made = make_plan(Facts("m"), [down("p")], [up("d")], fallback=True)
    assert engines(made) == (None, "d", "no_prefill_engine")


SECOND = Facts("m", last_prefill="p1", last_decode="d1", refuses=True)
P, D = [up("p1"), up("p2")], [up("d1"), up("d2")]


@pytest.mark.parametrize(
    ("why", "num_new", "engines_and_reason", "kv", "pull"),
    [
        pytest.param("no_record", None, ("p1", "d1", "affinity"), "no_record", False, id="nothing to pull"),
        pytest.param("offered", None, ("p1", "d1", "affinity"), "offered", True, id="new tokens not counted"),
        pytest.param("offered", 33, ("p1", "d1", "affinity"), "offered", True, id="one token too many for D alone"),
        pytest.param("offered", 32, (None, "d1", "short_suffix"), "own_cache", False, id="D alone at the break-even"),
        pytest.param("short", 32, (None, "d1", "short_suffix"), "own_cache", False, id="D alone, too short to pull"),
        pytest.param("short", 40, ("p1", "d1", "affinity"), "short", False, id="computed again"),
        pytest.param("self_checked", 5, ("p1", "d1", "affinity"), "self_checked", True, id="engines compare"),
        pytest.param("mismatch", 5, ("p1", "d1", "affinity"), "mismatch", False, id="another prompt"),
        pytest.param("no_offer", 5, ("p1", "d1", "affinity"), "no_offer", False, id="another turn has the blocks"),
        pytest.param("gone", 5, ("p1", "d1", "affinity"), "gone", False, id="given away"),
    ],
)
def test_use_of_the_last_turns_kv(
    why: Why, num_new: int | None, engines_and_reason: tuple[str | None, str, str], kv: str, pull: bool
) -> None:
    made = make_plan(replace(SECOND, why=why, num_new=num_new), P, D, break_even=32)
    assert (engines(made), made.kv, made.pull) == (engines_and_reason, kv, pull)


@pytest.mark.parametrize(
    ("decode", "expected", "kv", "pull"),
    [
        pytest.param([up("d1", 5), up("d2")], ("p1", "d2", "spill"), "offered", True, id="busy owner is still read"),
        pytest.param([down("d1"), up("d2")], ("p1", "d2", "moved"), "owner_down", False, id="dead owner is not asked"),
        pytest.param([up("d2")], ("p1", "d2", "moved"), "owner_down", False, id="owner is no longer in the pool"),
    ],
)
def test_blocks_are_pulled_from_their_owner_wherever_the_turn_goes(
    decode: list[EngineView], expected: tuple[str | None, str, str], kv: str, pull: bool
) -> None:
    made = make_plan(replace(SECOND, why="offered", num_new=3), P, decode, break_even=32)
    assert (engines(made), made.kv, made.pull) == (expected, kv, pull)


def test_decode_engine_that_cannot_refuse_is_not_left_alone() -> None:
    facts = replace(SECOND, why="offered", num_new=1, refuses=False)
    assert engines(make_plan(facts, P, D, break_even=32)) == ("p1", "d1", "affinity")


def test_nothing_is_pulled_from_an_engine_that_just_failed() -> None:
    made = make_plan(replace(SECOND, why="offered", num_new=1), P, D, break_even=32, avoid={"d1"})
    assert (engines(made), made.kv, made.pull) == (("p1", "d2", "moved"), "owner_down", False)


def test_every_reason_is_one_of_those_listed_for_the_metrics() -> None:
    for why in get_args(Why):
        for num_new in (None, 1, 1000):
            made = make_plan(replace(SECOND, why=why, num_new=num_new), P, D, break_even=32)
            assert made.reason in REASONS
            assert made.kv in KV_REASONS

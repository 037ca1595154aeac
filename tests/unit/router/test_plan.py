"""Which engines a turn gets, as tables."""

from __future__ import annotations

import pytest

from connectors.wire.openai import APIError
from router.plan import EngineView, Facts, Plan, make_plan

M = frozenset({"m"})


def up(url: str, in_flight: int = 0, dispatched: int = 0, *, models: frozenset[str] = M) -> EngineView:
    return EngineView(url, True, models, in_flight, dispatched)


def down(url: str, *, models: frozenset[str] = M) -> EngineView:
    return EngineView(url, False, models)


@pytest.mark.parametrize(
    ("facts", "prefill", "decode", "expected"),
    [
        pytest.param(Facts("m"), [up("p1")], [up("d1")], Plan("p1", "d1", "new"), id="only one of each"),
        pytest.param(
            Facts("m"), [up("p1", 2), up("p2", 1)], [up("d1", 1), up("d2")], Plan("p2", "d2", "new"), id="least busy"
        ),
        pytest.param(
            Facts("m"),
            [up("p1", 0, 9), up("p2", 0, 8)],
            [up("d1", 0, 1), up("d2", 0, 2)],
            Plan("p2", "d1", "new"),
            id="idle ones in turn",
        ),
        pytest.param(
            Facts("m"),
            [down("p1"), up("p2", 9)],
            [down("d1"), up("d2", 9)],
            Plan("p2", "d2", "new"),
            id="only the ready",
        ),
        pytest.param(
            Facts("m", last_prefill="p2", last_decode="d2"),
            [up("p1"), up("p2", 4)],
            [up("d1"), up("d2", 4)],
            Plan("p2", "d2", "affinity"),
            id="stays on its engines while they are not much busier",
        ),
        pytest.param(
            Facts("m", last_prefill="p2", last_decode="d2"),
            [up("p1"), up("p2", 5)],
            [up("d1"), up("d2", 5)],
            Plan("p1", "d1", "moved"),
            id="leaves them when they are",
        ),
        pytest.param(
            Facts("m", last_prefill="p2", last_decode="d2"),
            [up("p1"), down("p2")],
            [up("d1"), down("d2")],
            Plan("p1", "d1", "moved"),
            id="leaves them when they are down",
        ),
        pytest.param(
            Facts("m", alone="several_choices"),
            [down("p1")],
            [up("d1")],
            Plan(None, "d1", "several_choices"),
            id="decode engine alone needs no prefill engine",
        ),
        pytest.param(Facts("m"), [], [up("d1")], Plan(None, "d1", "no_prefill_pool"), id="no prefill pool"),
        pytest.param(
            Facts("a"),
            [up("p1"), up("p2", 5, models=frozenset({"m", "a"}))],
            [up("d1"), up("d2", 5, models=frozenset({"a"}))],
            Plan("p2", "d2", "new"),
            id="only engines that serve the model",
        ),
    ],
)
def test_plan(facts: Facts, prefill: list[EngineView], decode: list[EngineView], expected: Plan) -> None:
    assert make_plan(facts, prefill, decode) == expected


def test_engines_that_just_failed_are_avoided() -> None:
    facts = Facts("m", last_prefill="p1", last_decode="d1")
    avoid = {"p1", "d1"}
    assert make_plan(facts, [up("p1"), up("p2", 9)], [up("d1"), up("d2", 9)], avoid=avoid) == Plan("p2", "d2", "moved")


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
    assert make_plan(Facts("m"), [down("p")], [up("d")], fallback=True) == Plan(None, "d", "no_prefill_engine")

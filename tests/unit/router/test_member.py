"""The states of an engine, and what it gets in each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router import member
from router.member import Engine

MODELS = {"m": {"id": "m"}}


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time on."""
    now = [1000.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0], raising=False)

    def pass_on(seconds: float) -> None:
        now[0] += seconds

    return pass_on


@pytest.fixture
async def engine(clock: Callable[[float], None]) -> Engine:
    return Engine("http://user:secret@10.0.0.1:8000", "decode")


def fail(engine: Engine, times: int, *, may_eject: bool = True) -> None:
    for _ in range(times):
        engine.faulted("status", may_eject=may_eject)


async def test_joins_and_is_ready_once_it_lists_its_models(engine: Engine) -> None:
    assert (engine.state, engine.ready, engine.readable) == ("joining", False, False)
    engine.heard(MODELS)
    assert (engine.state, engine.ready, engine.readable) == ("ready", True, True)


async def test_what_its_url_says_of_a_user_is_not_in_its_name(engine: Engine) -> None:
    assert engine.name == "http://10.0.0.1:8000"


async def test_missed_looks_make_it_suspect_then_ejected(engine: Engine) -> None:
    engine.heard(MODELS)
    engine.missed("TimeoutError", 1.0)
    assert (engine.state, engine.ready, engine.spared) == ("suspect", True, True)
    engine.heard(MODELS)
    assert (engine.state, engine.spared) == ("ready", False)
    for _ in range(member.LOOKS_MISSED_UNTIL_EJECTED):
        engine.missed("TimeoutError", 1.0)
    assert (engine.state, engine.ready) == ("ejected", False)
    engine.heard(MODELS)
    assert engine.state == "ready"


async def test_one_that_cannot_be_reached_is_out_at_once_and_back_at_the_next_look(engine: Engine) -> None:
    engine.heard(MODELS)
    engine.lost("connection refused")
    assert (engine.state, engine.ready, engine.readable) == ("ejected", False, False)
    assert engine.doubt.is_set()
    engine.heard(MODELS)
    assert engine.state == "ready"


async def test_turn_after_turn_failed_ejects_it_for_longer_each_time(
    engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.heard(MODELS)
    seconds = member.EJECTED_SECONDS
    for _ in range(3):
        fail(engine, member.FAULTS_UNTIL_EJECTED - (engine.state == "probing") * (member.FAULTS_UNTIL_EJECTED - 1))
        assert engine.state == "ejected"
        clock(seconds - 0.1)
        engine.heard(MODELS)
        assert engine.state == "ejected", "its looks do not say that turns will not fail"
        clock(0.2)
        engine.heard(MODELS)
        assert engine.state == "probing"
        seconds *= 2
    engine.answered()
    assert engine.state == "ready"
    fail(engine, member.FAULTS_UNTIL_EJECTED)
    clock(member.EJECTED_SECONDS + 0.1)
    engine.heard(MODELS)
    assert engine.state == "probing", "a turn that succeeds makes it as good as new"


async def test_probing_one_gets_one_turn_at_a_time(engine: Engine, clock: Callable[[float], None]) -> None:
    engine.heard(MODELS)
    engine.eject("status")
    clock(member.EJECTED_SECONDS + 0.1)
    engine.heard(MODELS)
    assert engine.ready
    engine.in_flight = 1
    assert not engine.ready
    engine.in_flight = 0
    for _ in range(member.LOOKS_UNTIL_TRUSTED):
        engine.heard(MODELS)
    assert engine.state == "ready", "no turn came to try it"


async def test_success_in_between_keeps_it(engine: Engine) -> None:
    engine.heard(MODELS)
    for _ in range(10):
        fail(engine, member.FAULTS_UNTIL_EJECTED - 1)
        assert engine.state == "suspect"
        engine.answered()
        assert engine.state == "ready"


async def test_last_one_is_not_ejected_for_what_it_does_to_turns(engine: Engine) -> None:
    engine.heard(MODELS)
    fail(engine, 50, may_eject=False)
    assert (engine.state, engine.ready) == ("suspect", True)


@pytest.mark.parametrize("drainer", ["operator", "source", "itself"])
async def test_draining_one_gets_no_turns_and_may_be_read(engine: Engine, drainer: member.Drainer) -> None:
    engine.heard(MODELS)
    engine.drained_by.add(drainer)
    assert (engine.state, engine.ready, engine.readable) == ("draining", False, True)
    engine.lost("connection refused")
    assert (engine.state, engine.readable) == ("ejected", False)
    engine.heard(MODELS)
    assert engine.ready == (drainer == "itself"), "who comes back has not said that it will stop"


async def test_one_that_has_too_much_to_do_is_spared_for_a_while(
    engine: Engine, clock: Callable[[float], None]
) -> None:
    engine.heard(MODELS)
    engine.spare(3600)
    assert (engine.ready, engine.spared) == (True, True)
    clock(member.MAX_BUSY_SECONDS + 0.1)
    assert not engine.spared


async def test_changes_of_state_are_told_once_each(clock: Callable[[float], None]) -> None:
    told: list[str] = []
    engine = Engine("http://10.0.0.1:8000", "prefill", on_change=lambda: told.append(engine.state))
    engine.heard(MODELS)
    engine.heard(MODELS)
    engine.leaves()
    engine.lost("connection refused")
    engine.lost("connection refused")
    assert told == ["ready", "draining", "ejected"]

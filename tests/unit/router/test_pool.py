"""Who belongs to the pools."""

from __future__ import annotations

import pytest

from router import faults
from router.discovery.source import Found
from router.pool import Pool

A, B, C = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))


def urls(pool: Pool) -> list[str]:
    return [engine.url for engine in pool.decode]


async def test_engines_join_and_leave_as_their_source_says() -> None:
    pool = Pool(["decode"])
    joined: list[str] = []
    left: list[str] = []
    pool.on_join.append(lambda engine: joined.append(engine.url))
    pool.on_leave.append(lambda engine: left.append(engine.url))
    pool.update("decode", "s", [Found(A), Found(B)])
    first = pool.get("decode", A)
    pool.update("decode", "s", [Found(A), Found(C)])
    assert urls(pool) == [A, C]
    assert pool.get("decode", A) is first
    assert (joined, left) == ([A, B, C], [B])
    pool.update("decode", "s", [])
    assert (urls(pool), pool.has("decode"), pool.has("prefill")) == ([], True, False)


async def test_another_incarnation_at_the_same_address_is_another_engine() -> None:
    pool = Pool(["decode"])
    pool.update("decode", "s", [Found(A, "uid-1")])
    old = pool.get("decode", A)
    pool.dispatch(old)
    pool.update("decode", "s", [Found(A, "uid-2")])
    new = pool.get("decode", A)
    assert new is not old
    old.in_flight -= 1
    assert (old.state, old.in_flight, new.in_flight) == ("gone", 0, 0)


async def test_sources_do_not_take_each_others_engines() -> None:
    pool = Pool(["decode"])
    pool.update("decode", "one", [Found(A)])
    pool.update("decode", "other", [Found(A), Found(B)])
    pool.update("decode", "other", [])
    assert urls(pool) == [A], "the one that was first still names it"


async def test_one_that_has_left_is_found_by_the_turns_it_serves() -> None:
    pool = Pool(["decode"])
    pool.update("decode", "s", [Found(A)])
    engine = pool.get("decode", A)
    pool.dispatch(engine)
    pool.update("decode", "s", [])
    assert pool.get("decode", A) is engine
    assert pool.models() == {}


async def test_models_of_engines_that_have_left_are_remembered_within_bounds() -> None:
    pool = Pool(["decode"])
    for number in range(30):
        pool.update("decode", "s", [Found(A)])
        pool.get("decode", A).heard({f"m{number}-{n}": {"id": "x"} for n in range(100)})
        pool.update("decode", "s", [])
    assert "m29-99" in pool.remembered
    assert len(pool.remembered) <= 1000


@pytest.mark.parametrize("leaving", [False, True])
async def test_leaving_one_drains(leaving: bool) -> None:
    pool = Pool(["decode"])
    pool.update("decode", "s", [Found(A)])
    engine = pool.get("decode", A)
    engine.heard({"m": {"id": "m"}})
    pool.update("decode", "s", [Found(A, leaving=leaving)])
    assert engine.state == ("draining" if leaving else "ready")


async def test_operator_drains_by_the_name_that_the_status_shows() -> None:
    pool = Pool(["prefill", "decode"])
    secret = "http://user:secret@10.0.0.9:8000"
    pool.update("decode", "s", [Found(secret)])
    pool.update("prefill", "s", [Found(secret)])
    for engine in pool.engines:
        engine.heard({"m": {"id": "m"}})
    assert [one.role for one in pool.drain("http://10.0.0.9:8000", None, on=True)] == ["prefill", "decode"]
    assert {one.state for one in pool.engines} == {"draining"}
    assert [one.role for one in pool.drain(secret, "decode", on=False)] == ["decode"]
    assert [one.state for one in pool.engines] == ["draining", "ready"]
    assert pool.drain("http://nowhere:1", None, on=True) == []


async def test_not_more_than_half_of_a_pool_are_ejected_for_failing_turns() -> None:
    pool = Pool(["decode"])
    pool.update("decode", "s", [Found(url) for url in (A, B, C)])
    for engine in pool.decode:
        engine.heard({"m": {"id": "m"}})
    for _ in range(50):
        for engine in pool.decode:
            pool.blame(faults.fault(engine, "status", 500, "answered 500"))
    states = [engine.state for engine in pool.decode]
    assert states.count("ejected") == 1
    assert all(engine.ready for engine in pool.decode if engine.state != "ejected")


async def test_engine_that_two_sources_name_stays_as_long_as_one_does() -> None:
    pool = Pool(["decode"])
    pool.update("decode", "blue", [Found(A)])
    pool.update("decode", "green", [Found(A), Found(B)])
    pool.update("decode", "blue", [])
    assert sorted(urls(pool)) == [A, B]
    pool.update("decode", "green", [])
    assert urls(pool) == []


async def test_drained_one_that_goes_and_comes_back_stays_so_but_another_incarnation_does_not() -> None:
    pool = Pool(["decode"])
    pool.update("decode", "s", [Found(A, "uid-1")])
    pool.drain(A, None, on=True)
    for uid, state in (("uid-1", "draining"), ("uid-2", "ready")):
        pool.update("decode", "s", [])
        pool.update("decode", "s", [Found(A, uid)])
        pool.get("decode", A).heard({"m": {"id": "m"}})
        assert pool.get("decode", A).state == state


@pytest.mark.parametrize("url", ["http://10.0.0.1:0", "http://10.0.0.1:99999", "ftp://10.0.0.1:80", "nonsense"])
async def test_what_is_no_engine_does_not_join_and_hinders_nobody(url: str) -> None:
    pool = Pool(["decode"])
    pool.update("decode", "s", [Found(url), Found(B)])
    assert urls(pool) == [B]


async def test_encoders_are_engines_that_generate_nothing() -> None:
    pool = Pool(["decode", "encode"])
    pool.update("decode", "s", [Found(A)])
    pool.update("encode", "s", [Found(B)])
    for engine in pool.engines:
        engine.heard({"m": {"id": "m", "max_model_len": 8 if engine.url == B else 4096}})
    assert [engine.url for engine in pool.engines] == [A, B]
    assert [engine.url for engine in pool.generating] == [A]
    assert (pool.has("encode"), pool.has("prefill"), pool.is_up("encode")) == (True, False, True)
    assert pool.models()["m"]["max_model_len"] == 4096
    asked = pool.one_ready("m", rather=[B])
    assert asked is not None
    assert asked.url == A


async def test_ids_of_a_prompt_are_asked_of_the_engines_of_the_last_turn_unless_they_are_spared() -> None:
    pool = Pool(["prefill", "decode"])
    pool.update("prefill", "s", [Found(A), Found(B)])
    pool.update("decode", "s", [Found(C)])
    for engine in pool.engines:
        engine.heard({"m": {"id": "m"}})
    a, b, c = pool.engines

    def asked(*rather: str | None) -> object:
        return pool.one_ready("m", rather=rather)

    b.in_flight = 9
    assert [asked(B, C), asked(None, C), asked(None, None), asked("http://10.0.0.9:8000", None)] == [b, c, a, a]
    b.spare(5.0)
    assert asked(B, C) is c
    c.spare(5.0)
    assert asked(B, C) is a
    a.known.saw("tokenize", False)
    assert asked(B, C) is c, "spared is better than not able to"
    for engine in (b, c):
        engine.lost("connection refused")
    assert asked(B, C) is None
    assert pool.one_ready("other", rather=(A, None)) is None


async def test_only_engines_behind_a_lost_connection_are_in_doubt() -> None:
    pool = Pool(["prefill", "decode"])
    pool.update("prefill", "s", [Found(A), Found(B)])
    pool.update("decode", "s", [Found(B)])
    pool.doubt(pool.prefill[1].origin)
    assert [engine.doubt.is_set() for engine in pool.engines] == [False, True, True]
    gone = pool.decode[0]
    gone.doubt.clear()
    pool.update("decode", "s", [])
    pool.doubt(gone.origin)
    assert not gone.doubt.is_set()

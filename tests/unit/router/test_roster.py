"""The quick choice among engines against one that looks at all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.wire.openai import APIError
from router.capabilities import Capabilities, mismatch, traits
from router.choose import choose
from router.discovery.source import Found
from router.member import Engine, Role
from router.plan import Facts, make_plan
from router.pool import Pool
from router.ring import Ring
from router.roster import FEW, Roster
from router.verify import Why
from tests.unit.router.candidates import CAPABILITIES, EngineView, plan_over, pools
from tests.unit.router.plain_plan import able_of, plain_plan, well_of

MODELS = {"m": {"id": "m"}}
NEW = Facts("m")


def digest(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()


def by_group(pool: Sequence[EngineView]) -> list[EngineView]:
    """In the order in which a roster of them goes through them, so that equal draws are of equal engines."""
    keys = [(one.models, traits(one.can)) for one in pool]
    return [pool[number] for number in sorted(range(len(pool)), key=lambda number: keys.index(keys[number]))]


@given(CAPABILITIES, CAPABILITIES, CAPABILITIES)
def test_engines_with_equal_traits_are_alike_to_all_others(
    one: Capabilities, other: Capabilities, third: Capabilities
) -> None:
    same = replace(other, **{name: getattr(one, name) for name in ("kind", "version", "block_size", "cache_dtype")})
    same = replace(same, kv_layout=one.kv_layout, scale_out=one.scale_out)
    assert traits(same) == traits(one)
    assert mismatch(same, third) == mismatch(one, third)


@given(
    pools("p", most=FEW),
    pools("d", most=FEW),
    st.builds(
        Facts,
        model=st.just("m"),
        last_prefill=st.sampled_from([None, "p0", "p1"]),
        last_decode=st.sampled_from([None, "d0", "d1"]),
        why=st.sampled_from(get_args(Why)),
        owner=st.sampled_from([None, "e0"]),
        prefix=st.sampled_from([None, b"1"]),
        scale_out=st.booleans(),
    ),
    st.sets(st.sampled_from(["p0", "p2", "d0", "d1"])),
    st.integers(0, 9),
)
def test_few_engines_get_what_they_would_if_all_were_looked_at(
    prefill: list[EngineView], decode: list[EngineView], facts: Facts, avoid: set[str], seed: int
) -> None:
    expected = plain_plan(facts, by_group(prefill), by_group(decode), draw=random.Random(seed), avoid=avoid)
    try:
        plan = plan_over(facts, prefill, decode, draw=random.Random(seed), avoid=avoid)
    except APIError:
        assert expected is None
    else:
        assert (plan.prefill, plan.decode, plan.pull) == expected


class Changes:
    """What may happen to the engines of a pool, at random."""

    def __init__(self, seed: int, num_engines: int) -> None:
        self.random = random.Random(seed)
        self.pool = Pool(["prefill", "decode"])
        self.urls = [f"http://10.0.0.{number}:8000" for number in range(num_engines)]

    def happen(self) -> None:
        pool, draw = self.pool, self.random
        if not pool.engines or draw.random() < 0.05:
            named = [Found(url, str(draw.randrange(2))) for url in self.urls if draw.random() < 0.9]
            pool.update(draw.choice(("prefill", "decode")), "s", named)
        for engine in draw.sample(pool.engines, min(3, len(pool.engines))):
            self._happens_to(engine)

    def _happens_to(self, engine: Engine) -> None:
        draw = self.random
        match draw.randrange(9):
            case 0 | 1 | 2:
                engine.known.found(Capabilities(kind="vllm", version=draw.choice(("0.32.0", "0.33.0"))))
                engine.heard({name: {"id": name} for name in draw.choice(("m", "m", "mn", "n"))})
            case 3:
                engine.missed("TimeoutError", 0.0)
            case 4:
                engine.lost("connection refused")
            case 5:
                engine.eject("status")
                engine.hurry()
            case 6:
                self.pool.drain(engine.url, engine.role, on=draw.random() < 0.5)
            case 7:
                engine.spare(5.0)
            case _:
                engine.in_flight = draw.randrange(9)
                engine.answered()


@pytest.mark.parametrize(("seed", "num_engines"), [(1, 6), (2, 20), (3, 60)])
async def test_roster_follows_whatever_happens_to_engines(seed: int, num_engines: int) -> None:
    changes = Changes(seed, num_engines)
    pool, draw = changes.pool, changes.random
    num_chosen = 0
    for _ in range(400):
        changes.happen()
        role: Role = draw.choice(("prefill", "decode"))
        engines, roster = pool.of(role), pool.rosters[role]
        for engine in engines:
            place = roster.place(engine.url)
            assert place is not None
            assert place.engine is engine
            assert place.group.key == (engine.models.keys(), traits(engine.can))
            assert (engine in place.group.rotation) == engine.in_rotation
        avoid = {one.url for one in engines if draw.random() < 0.1}
        for model in ("m", "n", "x"):
            able = roster.able(model, avoid)
            expected = able_of(engines, model, avoid)
            assert sorted(one.url for one in able) == sorted(one.url for one in expected)
            assert roster.lists(model) == any(model in one.models for one in engines)
            if not expected:
                continue
            well = well_of(expected)
            last = draw.choice([None, draw.choice(changes.urls)])
            chosen = choose(able, last, slack=4, prefix=draw.choice([None, digest(draw.randrange(99))]), draw=draw)
            assert chosen in well
            assert last != chosen.url or chosen.load <= max(one.load for one in well)
            num_chosen += 1
    assert num_chosen > 300, "there was something to choose from"


def ready_pool(num_engines: int, role: Role = "decode") -> tuple[Pool, Roster[Engine]]:
    pool = Pool(["prefill", "decode"])
    pool.update(role, "s", [Found(f"http://10.0.{number // 250}.{number % 250}:8000") for number in range(num_engines)])
    for engine in pool.engines:
        engine.heard(MODELS)
    return pool, pool.rosters[role]


@pytest.mark.parametrize("num_engines", [3, FEW, FEW + 1, 200])
async def test_requests_are_spread_nearly_evenly(num_engines: int) -> None:
    draw = random.Random(5)
    pool, roster = ready_pool(num_engines)
    for _ in range(100 * num_engines):
        pool.dispatch(choose(roster.able("m"), None, slack=4, prefix=None, draw=draw))
    loads = [engine.in_flight for engine in pool.engines]
    assert max(loads) <= 103
    assert min(loads) >= 90


async def test_of_many_engines_those_that_failed_the_turn_or_are_spared_get_nothing() -> None:
    draw = random.Random(6)
    pool, roster = ready_pool(100)
    avoid = {engine.url for engine in pool.decode[:30]}
    for engine in pool.decode[30:60]:
        engine.spare(5.0)
    pool.decode[60].missed("TimeoutError", 0.0)
    pool.drain(pool.decode[61].url, "decode", on=True)
    fit = set(pool.decode[62:])
    able = roster.able("m", avoid)
    for number in range(2000):
        last = pool.decode[number % 100].url
        assert choose(able, None, slack=4, prefix=None, draw=draw) in fit
        assert choose(able, None, slack=4, prefix=digest(number), draw=draw) in fit
        assert choose(able, last, slack=4, prefix=None, draw=draw) in fit
    assert choose(able, pool.decode[70].url, slack=4, prefix=None, draw=draw) is pool.decode[70]


async def test_the_last_one_of_many_is_found() -> None:
    pool, roster = ready_pool(300)
    for engine in pool.decode[1:]:
        engine.spare(5.0)
    for prefix in (None, digest(1)):
        assert choose(roster.able("m"), None, slack=4, prefix=prefix, draw=random.Random(7)) is pool.decode[0]
    pool.decode[0].spare(5.0)
    for last in pool.decode[:5]:
        assert choose(roster.able("m"), last.url, slack=4, prefix=None, draw=random.Random(7)) is last, "all are spared"


async def test_prompts_that_begin_alike_keep_their_engine_of_many_when_others_come_and_go() -> None:
    pool, roster = ready_pool(101)
    draw = random.Random(8)

    def homes() -> list[Engine]:
        return [choose(roster.able("m"), None, slack=4, prefix=digest(number), draw=draw) for number in range(5000)]

    before = homes()
    assert homes() == before
    counts = Counter(before)
    assert len(counts) == 101
    assert max(counts.values()) < 2 * 5000 / 101, "fairly evenly"
    gone = pool.decode[50]
    gone.lost("connection refused")
    moved = [was for was, now in zip(before, homes(), strict=True) if was is not now]
    assert len(moved) == counts[gone], "what it had, and nothing else"
    gone.heard(MODELS)
    assert homes() == before


async def test_beginning_spills_over_to_the_same_few_of_many() -> None:
    _, roster = ready_pool(100)
    draw, key = random.Random(9), digest(1)
    homes: list[Engine] = []
    for _ in range(3):
        home = choose(roster.able("m"), None, slack=4, prefix=key, draw=draw)
        homes.append(home)
        home.in_flight = 5
    assert len(set(homes)) == 3
    homes[0].in_flight = 4
    assert choose(roster.able("m"), None, slack=4, prefix=key, draw=draw) is homes[0]


async def test_pairs_are_found_in_pools_of_two_versions() -> None:
    """One prefill engine of a hundred is of the version that nearly all decode engines have."""
    pool, draw = Pool(["prefill", "decode"]), random.Random(10)
    versions: dict[str, str] = {}
    ports: tuple[tuple[Role, int, int], ...] = (("prefill", 8000, 99), ("decode", 8100, 5))
    for role, port, num_old in ports:
        pool.update(role, "s", [Found(f"http://10.0.0.{number}:{port}") for number in range(100)])
        for number, engine in enumerate(pool.of(role)):
            versions[engine.url] = "0.32.0" if number < num_old else "0.33.0"
            engine.known.found(Capabilities(kind="vllm", version=versions[engine.url]))
            engine.heard(MODELS)

    def pairs() -> list[tuple[str | None, str]]:
        plans = [make_plan(NEW, pool.rosters["prefill"], pool.rosters["decode"], draw=draw) for _ in range(300)]
        assert {one.reason for one in plans} == {"new"}
        return [(versions[one.prefill or ""], versions[one.decode]) for one in plans]

    assert set(pairs()) == {("0.32.0", "0.32.0"), ("0.33.0", "0.33.0")}
    pool.prefill[99].lost("connection refused")
    assert set(pairs()) == {("0.32.0", "0.32.0")}


def test_circle_forgets_who_has_left() -> None:
    ring: Ring[str] = Ring()
    for name in ("a", "b", "c"):
        ring.add(name, name)
    ring.remove("b")
    around = list(ring.after(1 << 60))
    assert {name for _, name in around} == {"a", "c"}
    assert [far for far, _ in around] == sorted(far for far, _ in around)
    assert 0 <= around[0][0] <= around[-1][0] < 1 << 64

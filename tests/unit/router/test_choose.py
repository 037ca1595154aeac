"""Which of several engines gets a turn."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import pytest

from router import choose, plan
from router.plan import Facts
from router.roster import Roster
from tests.unit.router.candidates import EngineView, plan_over

M = frozenset({"m"})


def up(url: str, load: float = 0, last: int = 0, *, spared: bool = False) -> EngineView:
    return EngineView(url, True, M, load, last, spared=spared)


def prefix(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def chosen(able: list[EngineView], *, last: str | None = None, by: bytes | None = None, slack: float = 4) -> str:
    return choose.choose(Roster(able).able("m"), last, slack=slack, prefix=by, draw=random.Random(1)).url


@pytest.mark.parametrize(
    ("able", "last", "expected"),
    [
        pytest.param([up("a", 3), up("b", 2)], None, "b", id="the less busy"),
        pytest.param([up("a", 0, 5), up("b", 0, 4)], None, "b", id="the longer idle"),
        pytest.param([up("a", 0), up("b", 4)], "b", "b", id="its own"),
        pytest.param([up("a", 0), up("b", 4.5)], "b", "a", id="its own has too much to do"),
        pytest.param([up("a", 9), up("b", 0, spared=True)], None, "a", id="one that is spared is left alone"),
        pytest.param([up("a", 9), up("b", 0, spared=True)], "b", "a", id="also by its own conversations"),
        pytest.param([up("b", 0, spared=True)], None, "b", id="unless there is no other"),
    ],
)
def test_choice(able: list[EngineView], last: str | None, expected: str) -> None:
    assert chosen(able, last=last) == expected


def test_two_drawn_at_random_spread_requests_nearly_evenly() -> None:
    draw = random.Random(3)
    loads = dict.fromkeys("abcdefgh", 0)
    for number in range(800):
        able = [up(url, load, number) for url, load in loads.items()]
        loads[choose.choose(Roster(able).able("m"), None, slack=4, prefix=None, draw=draw).url] += 1
    assert max(loads.values()) - min(loads.values()) <= 5


def test_the_busiest_of_many_is_never_drawn() -> None:
    able = [up(url, 1) for url in "abcdefg"] + [up("busy", 100)]
    draw = random.Random(4)
    assert "busy" not in {
        choose.choose(Roster(able).able("m"), None, slack=4, prefix=None, draw=draw).url for _ in range(500)
    }


def test_prompts_that_begin_alike_go_to_one_engine_and_others_elsewhere() -> None:
    able = [up(url) for url in ("http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000")]
    counts = Counter(chosen(able, by=prefix(f"You are assistant {number}.")) for number in range(3000))
    assert len(counts) == 3
    assert min(counts.values()) > 800, "evenly"
    for _ in range(20):
        assert chosen(able, by=prefix("You are helpful.")) == chosen(able[::-1], by=prefix("You are helpful."))


def test_beginning_spills_over_when_its_engine_has_too_much_to_do() -> None:
    key = prefix("You are helpful.")
    home = chosen([up("a"), up("b"), up("c")], by=key)
    loads = {url: 5.0 if url == home else 0.0 for url in "abc"}
    second = chosen([up(url, load) for url, load in loads.items()], by=key)
    assert second != home
    assert chosen([up(url) for url in "abc" if url != home], by=key) == second, "always to the same one"
    assert chosen([up(url, 4.0 if url == home else 0.0) for url in "abc"], by=key) == home, "as long as slack allows"


@pytest.mark.parametrize("change", ["one more", "one less"])
def test_when_engines_change_only_what_they_get_or_had_is_moved(change: str) -> None:
    """A thousand conversations on four engines; those with state do not move at all."""
    before = [up(f"http://10.0.0.{number}:8000") for number in range(1, 5)]
    after = [*before, up("http://10.0.0.5:8000")] if change == "one more" else before[1:]
    make = partial(plan_over, prefill=[], has_prefill=False, draw=random.Random(5))
    homes = {n: make(Facts("m", prefix=prefix(str(n))), decode=before).decode for n in range(1000)}
    new_homes = {n: make(Facts("m", prefix=prefix(str(n))), decode=after).decode for n in range(1000)}
    moved = {n for n in homes if homes[n] != new_homes[n]}
    if change == "one more":
        assert 0 < len(moved) <= 300
        assert {new_homes[n] for n in moved} == {"http://10.0.0.5:8000"}
    else:
        assert {homes[n] for n in moved} == {before[0].url}
    still_there = {one.url for one in after}
    for n, home in homes.items():
        facts = Facts("m", last_decode=home, prefix=prefix(str(n)))
        again = make(facts, decode=after).decode
        assert again == home or home not in still_there


@pytest.mark.parametrize(
    ("owner", "kv"),
    [("e1", "offered"), (None, "offered"), ("e0", "owner_restarted")],
)
def test_blocks_of_an_engine_that_was_started_anew_are_not_offered(owner: str | None, kv: str) -> None:
    d = up("d")._replace(engine_id="e1")
    facts = Facts("m", last_decode="d", why="offered", owner=owner)
    made = plan_over(facts, [up("p")], [d], draw=random.Random(1))
    assert (made.kv, made.pull) == (kv, kv == "offered")


def test_engine_that_drains_may_still_be_read() -> None:
    gone = up("d1")._replace(ready=False)
    facts = Facts("m", last_decode="d1", why="offered")
    made = plan_over(facts, [up("p")], [gone, up("d2")], draw=random.Random(1))
    assert (made.decode, made.reason, made.pull) == ("d2", "moved", True)
    made = plan_over(replace(facts), [up("p")], [gone._replace(readable=False), up("d2")], draw=random.Random(1))
    assert (made.decode, made.kv, made.pull) == ("d2", "owner_down", False)


def test_model_of_engines_that_have_left_is_503_and_no_other() -> None:
    for served, status in (({"m"}, 503), (set(), 404)):
        with pytest.raises(plan.APIError) as refused:
            plan_over(Facts("m"), [], [up("d")._replace(models=frozenset("x"))], draw=random.Random(1), served=served)
        assert refused.value.status == status

"""Who exchanges KV with whom, and plans over pools of all sorts."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.wire.openai import APIError
from router.capabilities import FACTS, Capabilities, assumed, exchanges, lowers, merged, mismatch
from router.plan import Facts, Lack
from router.verify import Why
from tests.unit.router.candidates import CAPABILITIES, EngineView, plan_over, pools

OURS = Capabilities(kind="backhaul", version="0.1.0", kv_layout="a")
VLLM = Capabilities(kind="vllm", version="0.32.0", block_size=32)


@pytest.mark.parametrize(
    ("p", "d", "expected"),
    [
        pytest.param(Capabilities(), Capabilities(), None, id="neither known"),
        pytest.param(OURS, OURS, None, id="ours"),
        pytest.param(OURS, replace(OURS, version="0.2.0"), None, id="ours of two versions"),
        pytest.param(OURS, replace(OURS, kv_layout=None), None, id="one layout not known"),
        pytest.param(OURS, replace(OURS, kv_layout="b"), "kv_layout", id="two layouts"),
        pytest.param(OURS, VLLM, "kind", id="two kinds"),
        pytest.param(VLLM, Capabilities(), "kind", id="one kind not known"),
        pytest.param(VLLM, VLLM, None, id="vLLM"),
        pytest.param(VLLM, replace(VLLM, block_size=None), None, id="one block size not known"),
        pytest.param(VLLM, replace(VLLM, block_size=16), "block_size", id="two block sizes"),
        pytest.param(VLLM, replace(VLLM, version="0.33.0"), "version", id="two versions of vLLM"),
        pytest.param(
            replace(VLLM, cache_dtype="auto"), replace(VLLM, cache_dtype="fp8"), "cache_dtype", id="two dtypes"
        ),
    ],
)
def test_exchange(p: Capabilities, d: Capabilities, expected: str | None) -> None:
    assert mismatch(p, d) == mismatch(d, p) == expected
    assert exchanges(p, d) is (expected is None)


@pytest.mark.parametrize(
    ("version", "streams"),
    [("0.32.0", False), ("0.33.0", True), ("v0.33.1rc2", True), ("1.0.0", True), ("dev", None), (None, None)],
)
def test_streams_by_version(version: str | None, streams: bool | None) -> None:
    known = assumed("vllm", version)
    assert known.streams_carry_params is streams
    assert replace(known, kind="vllm").stream_carries("generate") is False
    assert replace(known, kind="vllm").stream_carries("chat") is streams


def test_first_layer_that_knows_a_fact_tells_it() -> None:
    known = merged(
        ("stated", Capabilities(bidirectional=False)),
        ("seen", Capabilities(bidirectional=True, tokenize=False)),
        ("assumed", Capabilities(tokenize=True, release=False)),
    )
    assert (known.bidirectional, known.tokenize, known.release, known.seal) == (False, False, False, None)
    assert known.sources == {"bidirectional": "stated", "tokenize": "seen", "release": "assumed"}


def test_our_engine_lacks_nothing() -> None:
    known = merged(("seen", OURS), ("seen", Capabilities(scale_out=True)), ("assumed", assumed("backhaul", "0.1.0")))
    assert list(lowers(known, "prefill")) == list(lowers(known, "decode")) == []


def test_what_vllm_lacks_is_said_in_words() -> None:
    known = merged(("seen", VLLM), ("assumed", assumed("vllm", "0.32.0")))
    assert [lack.capability for lack in lowers(known, "encode")] == ["seal"]
    assert [lack.capability for lack in lowers(known, "decode")] == ["streams_carry_params", "release", "seal"]
    assert [lack.capability for lack in lowers(known, "prefill")] == ["bidirectional", "release", "seal"]


# Plans over mixed pools.


make_plan = partial(plan_over, draw=random.Random(7))


def up(url: str, known: Capabilities, in_flight: int = 0, *, pulls: bool = True) -> EngineView:
    return EngineView(url, True, frozenset("m"), in_flight, can=known, pulls=pulls)


def test_pairs_are_of_one_kind_whoever_is_idle() -> None:
    p = [up("p-ours", OURS, 9), up("p-vllm", VLLM)]
    plan = make_plan(Facts("m"), p, [up("d-ours", OURS)])
    assert (plan.prefill, plan.decode, plan.lack) == ("p-ours", "d-ours", None)


def test_decode_engine_without_a_partner_is_left_for_one_with() -> None:
    plan = make_plan(Facts("m"), [up("p-vllm", VLLM)], [up("d-ours", OURS), up("d-vllm", VLLM, 9)])
    assert (plan.prefill, plan.decode) == ("p-vllm", "d-vllm")


def test_decode_engine_works_alone_if_nobody_can_compute_for_it() -> None:
    plan = make_plan(Facts("m"), [up("p", VLLM)], [up("d", replace(VLLM, block_size=16))])
    assert (plan.prefill, plan.decode, plan.reason) == (None, "d", "no_compatible_prefill")
    assert plan.lack == Lack("handoff", "block_size")


def test_partner_that_is_down_is_waited_for() -> None:
    down = up("p-ours", OURS)._replace(ready=False)
    with pytest.raises(APIError) as refused:
        make_plan(Facts("m"), [up("p-vllm", VLLM), down], [up("d", OURS)])
    assert refused.value.status == 503
    plan = make_plan(Facts("m"), [up("p-vllm", VLLM), down], [up("d", OURS)], fallback=True)
    assert (plan.prefill, plan.reason) == (None, "no_prefill_engine")


LAST = Facts("m", last_decode="d1", why="offered")


def test_blocks_are_not_pulled_across_kinds() -> None:
    d = [up("d1", OURS, 9), up("d2", VLLM)]
    plan = make_plan(LAST, [up("p", VLLM)], d)
    assert (plan.prefill, plan.decode, plan.kv, plan.pull) == ("p", "d2", "incompatible", False)
    assert plan.lack == Lack("pull", "kind")


@pytest.mark.parametrize(("bidirectional", "why"), [(False, "one_way"), (None, "on_trial")])
def test_blocks_are_not_given_to_an_engine_that_may_wait_for_ever(bidirectional: bool | None, why: str) -> None:
    p = up("p", replace(VLLM, bidirectional=bidirectional), pulls=False)
    plan = make_plan(LAST, [p], [up("d1", VLLM)])
    assert (plan.prefill, plan.decode, plan.kv, plan.pull) == ("p", "d1", "one_way", False)
    assert plan.lack == Lack("pull", why)


def test_token_turns_pass_by_engines_that_do_not_serve_them() -> None:
    with_it, without = replace(VLLM, scale_out=True), replace(VLLM, scale_out=False)
    facts = Facts("m", scale_out=True)
    plan = make_plan(facts, [up("p1", without), up("p2", with_it, 9)], [up("d1", without), up("d2", with_it, 9)])
    assert (plan.prefill, plan.decode) == ("p2", "d2")
    plan = make_plan(facts, [up("p1", without)], [up("d2", with_it)])
    assert (plan.prefill, plan.reason, plan.lack) == (None, "no_compatible_prefill", Lack("handoff", "scale_out"))
    assert make_plan(facts, [up("p1", without)], [up("d1", without)]).decode == "d1"


@given(
    pools("p"),
    pools("d"),
    st.builds(
        Facts,
        model=st.just("m"),
        last_prefill=st.sampled_from([None, "p0", "p1"]),
        last_decode=st.sampled_from([None, "d0", "d1"]),
        num_new=st.sampled_from([None, 1, 100]),
        why=st.sampled_from(get_args(Why)),
        refuses=st.booleans(),
        owner=st.sampled_from([None, "e0"]),
        prefix=st.sampled_from([None, b"1"]),
        scale_out=st.booleans(),
    ),
    st.sets(st.sampled_from(["p0", "d0"])),
    st.booleans(),
)
def test_no_plan_hands_kv_to_an_engine_that_cannot_use_it(
    prefill: list[EngineView], decode: list[EngineView], facts: Facts, avoid: set[str], fallback: bool
) -> None:
    try:
        plan = make_plan(
            facts, prefill, decode, avoid=avoid, fallback=fallback, break_even=10, has_prefill=bool(prefill)
        )
    except APIError:
        able = [d for d in decode if d.ready and "m" in d.models and d.url not in avoid]
        assert not able or (prefill and not fallback), "whoever is there has an answer"
        return
    d = next(one for one in decode if one.url == plan.decode)
    assert d.ready
    if plan.prefill is not None:
        p = next(one for one in prefill if one.url == plan.prefill)
        assert p.ready
        assert exchanges(p.can, d.can)
        assert not (facts.scale_out and p.can.scale_out is False)
        if plan.pull:
            owner = next(one for one in decode if one.url == facts.last_decode)
            assert facts.why in ("offered", "self_checked")
            assert owner.readable
            assert owner.has(facts.owner)
            assert p.pulls
            assert exchanges(p.can, owner.can)
    elif plan.reason == "no_compatible_prefill":
        able = [p for p in prefill if p.ready and "m" in p.models and p.url not in avoid]
        assert able
        assert plan.lack is not None
        assert not any(exchanges(p.can, d.can) and not facts.scale_out for p in able)
    assert not plan.pull or plan.prefill is not None


@given(CAPABILITIES, CAPABILITIES)
def test_exchange_is_mutual(one: Capabilities, other: Capabilities) -> None:
    assert mismatch(one, other) == mismatch(other, one)
    assert exchanges(one, one)


def test_every_fact_may_be_unknown() -> None:
    assert [name for name in FACTS if getattr(Capabilities(), name) is not None] == []

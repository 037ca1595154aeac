"""What is found out about engines by asking them, over real HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.capabilities import Capabilities
from router.known import MAX_TRIES
from router.member import Engine
from router.statement import EngineStatement
from tests.unit.router.stand_ins import BareStandIn, HostileStandIn, OurStandIn, StandIn, looked_at


async def test_vllm_of_a_version_that_streams_no_params() -> None:
    async with StandIn().running() as vllm, looked_at(vllm) as (_, [engine]):
        now = engine.known.now
    assert engine.state == "ready"
    assert (now.kind, now.version, now.block_size, now.num_blocks, now.cache_dtype) == (
        "vllm",
        "0.32.0",
        32,
        728,
        "auto",
    )
    assert (now.tokenize, now.scale_out, now.release, now.seal) == (True, False, False, False)
    assert (now.streams_carry_params, now.sources["streams_carry_params"]) == (False, "assumed")
    assert (now.bidirectional, now.return_token_ids) == (None, True)
    assert now.sources["block_size"] == "seen"


async def test_our_engine_tells_its_layout() -> None:
    async with OurStandIn().running() as ours, looked_at(ours) as (_, [engine]):
        now = engine.known.now
    assert (now.kind, now.engine_id, now.kv_layout, now.num_blocks) == ("backhaul", "e-1", "layout-1", 512)
    assert (now.scale_out, now.release, now.sources["release"], now.token_note) == (True, True, "seen", True)
    assert "GET /metrics" not in ours.asked


async def test_engine_with_nothing_but_models_is_ready_and_unknown() -> None:
    async with BareStandIn().running() as bare, looked_at(bare) as (_, [engine]):
        now = engine.known.now
    assert engine.state == "ready"
    assert (now.kind, now.version, now.block_size, now.bidirectional) == (None, None, None, None)
    assert (now.tokenize, now.scale_out, now.release) == (False, False, False)


@pytest.mark.parametrize("manner", ["huge", "garbage", "wrong types", "hangs up", "slow"])
@pytest.mark.parametrize("owned_by", ["vllm", "backhaul"])
async def test_hostile_answers_leave_facts_unknown(manner: str, owned_by: str) -> None:
    seconds = 0.2 if manner == "slow" else 5.0
    async with (
        HostileStandIn(owned_by=owned_by, manner=manner).running() as hostile,
        looked_at(hostile, seconds=seconds) as (_, [engine]),
    ):
        now = engine.known.now
        assert isinstance(hostile, HostileStandIn)
        hostile.done.set()
    assert engine.state == "ready"
    assert now.kind == owned_by
    assert (now.version, now.engine_id, now.block_size, now.num_blocks, now.kv_layout) == (None,) * 5


async def test_prefill_engine_that_has_pulled_can() -> None:
    async with StandIn(pulls="3.0").running() as vllm, looked_at(vllm) as (_, [engine]):
        assert (engine.known.now.bidirectional, engine.known.now.sources["bidirectional"]) == (True, "seen")


@pytest.mark.parametrize("size", ["None", "-1", "0", "99999999999", "32.5", "²"])
async def test_block_size_that_is_none_is_not_known(size: str) -> None:
    async with StandIn(block_size=size).running() as vllm, looked_at(vllm) as (_, [engine]):
        assert engine.known.now.block_size is None


async def test_it_is_asked_once_and_again_when_it_was_away_or_lists_other_models() -> None:
    async with StandIn().running() as vllm, looked_at(vllm) as (watch, [engine]):
        questions = vllm.asked.count("GET /version")
        await watch.look(engine)
        assert vllm.asked.count("GET /version") == questions == 1
        engine.lost("unreachable")
        vllm.version = "0.33.0"
        await watch.look(engine)
        assert (engine.known.now.version, engine.known.now.streams_carry_params) == ("0.33.0", True)
        vllm.models = ("m", "an-adapter")
        await watch.look(engine)
        assert vllm.asked.count("GET /version") == 3


async def test_one_that_was_too_busy_to_answer_is_asked_again_a_few_times() -> None:
    async with (
        HostileStandIn(manner="hangs up").running() as busy,
        looked_at(busy) as (watch, [engine]),
    ):
        looks = 1
        while engine.known.stale:
            await watch.look(engine)
            looks += 1
    assert looks == MAX_TRIES


async def test_engine_that_wants_a_key_gets_the_operators(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    async with StandIn(api_key="s3cret").running() as vllm:
        async with looked_at(vllm) as (_, [engine]):
            assert engine.state == "joining"
        stated = {vllm.url: EngineStatement(api_key_file=file)}
        async with looked_at(vllm, stated=stated) as (_, [engine]):
            assert engine.state == "ready"


async def test_what_the_operator_states_wins() -> None:
    async with StandIn().running() as vllm:
        stated = {vllm.url: EngineStatement(kind="backhaul", block_size=64, bidirectional=False)}
        async with looked_at(vllm, stated=stated) as (_, [engine]):
            now = engine.known.now
            assert engine.is_ours("m")
    assert (now.kind, now.block_size, now.bidirectional) == ("backhaul", 64, False)
    assert {now.sources[name] for name in ("kind", "block_size", "bidirectional")} == {"stated"}


async def test_what_is_stated_is_known_from_the_start() -> None:
    engine = Engine("http://p:1", "prefill", EngineStatement(kind="vllm", block_size=16))
    assert engine.can == Capabilities(
        kind="vllm", block_size=16, return_token_ids=True, release=False, token_note=False, seal=False
    )


async def test_prompts_are_not_sent_to_an_engine_that_tells_no_ids() -> None:
    async with StandIn().running() as vllm, BareStandIn().running() as bare:
        async with looked_at(bare, vllm) as (watch, engines):
            assert watch.pool.one_ready("m", rather=[bare.url]) is engines[1]
        async with looked_at(bare) as (watch, _):
            assert watch.pool.one_ready("m", rather=[]) is None

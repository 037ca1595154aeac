"""Between two turns: what a decode engine offers, and what the next turn's prefill engine makes of it."""

from __future__ import annotations

import pytest

from connectors.fake import Fault
from connectors.kv import KVConnector
from connectors.wire.transfer import KVTransferParams, WireError
from engine.messages import Stop
from engine.request import RequestStatus
from tests.fake_engines import CLAIM_SECONDS, LAYOUT, LEASE_SECONDS, OFFER_SECONDS, FakeEngine, pair, settle_all
from tests.fake_runner import BLOCK_SIZE, EOS, expected_output, make_request, prompt_ending_in, prompt_of

LOADING, RUNNING = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING


def first_turn(
    p: FakeEngine, d: FakeEngine, prompt: list[int], max_tokens: int = 5
) -> tuple[list[int], KVTransferParams]:
    """A turn by hand: the conversation's tokens so far, and D's offer."""
    answer, offer = d.decode(prompt, p.prefill(prompt), max_tokens=max_tokens)
    settle_all(p, d, seconds=1)
    return [*prompt, *answer], offer


def forget(engine: FakeEngine) -> None:
    """Empty the prefix cache, as traffic would."""
    request = engine.submit(prompt_of(engine.pool.num_blocks * BLOCK_SIZE - 1, 999), max_tokens=1)
    engine.run()
    assert request.status.finished


def pulled(engine: FakeEngine, prompt: list[int], offer: KVTransferParams) -> int:
    """Run a prefill leg with an offer, check its answer, and say how many tokens it pulled."""
    request = engine.submit(prompt, max_tokens=1, params=KVTransferParams.for_prefill(offer))
    engine.run()
    assert engine.answer(request) == expected_output(prompt, max_tokens=1)
    said = engine.said(request)
    assert (said.do_remote_prefill, said.do_remote_decode) == (True, False)
    assert said.remote_prefill_pulled_tokens == request.num_external_tokens
    # Released at once, so that tests can go on with an engine without pinned blocks.
    engine.connector.reject(said)
    return request.num_external_tokens


@pytest.fixture
def engines() -> tuple[FakeEngine, FakeEngine]:
    p, d, _ = pair()
    return p, d


# What D offers


def test_the_offer_says_everything_the_next_turn_needs(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    prompt = prompt_of(10)
    tokens, offer = first_turn(p, d, prompt)
    (blocks,) = offer.remote_block_ids or [[]]
    assert len(tokens) == 15
    assert [d.pool.blocks[block].idle_count for block in blocks] == [1, 1, 1, 1]
    assert offer.to_json() == {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [blocks],
        "remote_engine_id": "d",
        "remote_request_id": offer.remote_request_id,
        "remote_host": "d.test",
        "remote_port": 8100,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 14,
        "remote_blocks_expiry_time": offer.remote_blocks_expiry_time,
        "remote_blocks_ttl": OFFER_SECONDS,
        "remote_block_size": BLOCK_SIZE,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_block_hashes": [value.hex() for value in make_request(tokens).hash_chain(14)],
        "kv_layout": LAYOUT,
    }
    d.check_idle()


@pytest.mark.parametrize(
    ("asked", "kept"), [(OFFER_SECONDS / 2, OFFER_SECONDS / 2), (2 * OFFER_SECONDS, OFFER_SECONDS)]
)
def test_an_offer_stands_no_longer_than_it_is_of_use(
    engines: tuple[FakeEngine, FakeEngine], asked: float, kept: float
) -> None:
    p, d = engines
    _, offer = d.decode(prompt_of(10), p.prefill(prompt_of(10)).kept_for(asked))
    assert offer.remote_blocks_ttl == kept
    settle_all(p, d, seconds=kept - 1)
    assert d.leases.num_idle == 1
    settle_all(p, d, seconds=2)
    assert d.leases.num_idle == 0
    d.check_idle()


@pytest.mark.parametrize("how", ["eos", "stop token", "length"])
def test_however_a_turn_ends_well_its_blocks_are_on_offer(engines: tuple[FakeEngine, FakeEngine], how: str) -> None:
    p, d = engines
    prompt = prompt_ending_in(EOS if how == "eos" else 17)
    options = {"max_tokens": 1 if how == "length" else 9, "ignore_eos": how != "eos"}
    stops = frozenset({17}) if how == "stop token" else frozenset()
    tokens, offer = d.decode(prompt, p.prefill(prompt), stop_token_ids=stops, **options)
    assert len(tokens) == 1
    assert (offer.do_remote_decode, offer.remote_num_tokens) == (True, len(prompt))


def test_after_a_stop_string_no_more_is_offered_than_was_kept(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    request = d.submit(prompt_of(6), max_tokens=50, params=p.prefill(prompt_of(6)))
    d.step()
    d.network.advance()
    for _ in range(9):
        d.step()
    d.scheduler.stop(Stop(request.request_id, aborted=False, num_output_tokens=3))
    d.collect()
    offer = d.said(request)
    kept = make_request([*prompt_of(6), *d.answer(request)[:3]])
    assert offer.remote_num_tokens == 9
    assert offer.remote_block_hashes == [value.hex() for value in kept.hash_chain(9)]
    assert len((offer.remote_block_ids or [[]])[0]) == 3
    d.check_idle()


@pytest.mark.parametrize("how", ["abort", "error"])
def test_a_turn_that_ends_badly_offers_nothing(how: str) -> None:
    p, d, network = pair(decode={"policy": "fail"})
    network.faults = lambda pull: Fault(fails="transfer" if how == "error" else None)
    request = d.submit(prompt_of(10), max_tokens=50, params=p.prefill(prompt_of(10)))
    for _ in range(4):
        d.step()
        network.advance()
    d.abort(request)
    d.step()
    assert d.final(request).finish_reason == how
    assert d.final(request).kv_transfer_params is None
    settle_all(p, d)
    d.check_empty()


def test_a_turn_prefilled_by_decode_is_offered_if_asked(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    answer, offer = d.decode(prompt_of(10), KVTransferParams.for_decode_alone(), max_tokens=3)
    assert answer == expected_output(prompt_of(10), max_tokens=3)
    assert pulled(p, [*prompt_of(10), *answer, 7], offer) == 12


def test_nothing_is_offered_to_who_does_not_ask(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    for params in (None, KVTransferParams(do_remote_decode=False), KVTransferParams(offer_blocks=False)):
        request = d.submit(prompt_of(10), params=params)
        d.run()
        assert d.final(request).kv_transfer_params is None
    alone = p.submit(prompt_of(10), params=KVTransferParams.for_decode_alone())
    p.run()
    assert p.final(alone).kv_transfer_params is None
    p.check_empty()
    d.check_empty()


def test_after_a_hand_off_nothing_is_offered_to_who_declines(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    request = d.submit(prompt_of(10), params=p.prefill(prompt_of(10)).with_(offer_blocks=False))
    d.run()
    assert d.final(request).finish_reason == "length"
    assert d.final(request).kv_transfer_params is None
    settle_all(p, d)
    p.check_empty()
    d.check_empty()


def test_without_bidirectional_transfer_nothing_is_offered_and_nothing_taken() -> None:
    p, d, network = pair(prefill={"bidirectional": False})
    tokens, offer = first_turn(p, d, prompt_of(10))
    forget(p)
    assert pulled(p, [*tokens, 7], offer) == 0
    settle_all(p, d, seconds=1)
    assert p.connector.reader.num_not_pulled == {"disabled": 1}
    d.check_empty()
    one_way = FakeEngine(network=network, role="decode", name="d2", bidirectional=False)
    request = one_way.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    one_way.run()
    assert one_way.final(request).kv_transfer_params is None


def test_an_offer_ends_by_itself_and_its_blocks_stay_in_the_prefix_cache(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    p, d = engines
    tokens, offer = first_turn(p, d, prompt_of(10))
    settle_all(p, d, seconds=OFFER_SECONDS)
    d.check_empty()
    assert d.leases.num_ended == {"expired": 1}
    again = d.submit(tokens, max_tokens=1)
    d.run()
    assert again.num_cached_tokens == 12
    forget(p)
    assert pulled(p, [*tokens, 7], offer) == 0
    assert p.connector.reader.num_pulls_failed == {"claim": 1}
    assert d.leases.num_claims_refused == {"expired": 1}


# What P makes of it


@pytest.mark.parametrize(
    ("prompt", "num_pulled"),
    [
        (lambda tokens: [*tokens, 7, 8], 14),
        (lambda tokens: tokens[:14], 14),
        (lambda tokens: tokens[:13], 12),
        (lambda tokens: tokens[:12], 12),
        (lambda tokens: [*tokens[:13], 7, *tokens[13:]], 12),
        (lambda tokens: [*tokens[:9], 7, *tokens[10:]], 8),
        (lambda tokens: [7, *tokens[1:]], 0),
        (lambda tokens: tokens[4:], 0),
        (lambda tokens: tokens[:3], 0),
    ],
    ids=["next", "same", "cut", "cut at a block", "inserted", "changed", "other start", "dropped", "cut to nothing"],
)
@pytest.mark.parametrize("told", ["hashes", "no hashes"])
def test_what_the_prompt_has_in_common_is_pulled(
    engines: tuple[FakeEngine, FakeEngine], prompt, num_pulled: int, told: str
) -> None:
    p, d = engines
    tokens, offer = first_turn(p, d, prompt_of(10))
    forget(p)
    prompt = prompt(tokens)
    if told == "no hashes":
        common = next((n for n, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), len(prompt))
        trimmed = offer.trimmed(common)
        if trimmed is None:
            return
        offer = trimmed.without("remote_block_hashes")
    assert pulled(p, prompt, offer) == num_pulled
    settle_all(p, d, seconds=1)
    assert (d.leases.num_ended, len(d.leases)) == ({"released": 1}, 0)
    reader = p.connector.reader
    offered = min(offer.remote_num_tokens or 0, len(prompt))
    assert reader.num_tokens_pulled["decode"] == num_pulled
    assert sum(reader.num_tokens_not_pulled.values()) == offered - num_pulled


def test_without_hashes_an_offer_of_another_history_is_found_out(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    tokens, offer = first_turn(p, d, prompt_of(10))
    forget(p)
    edited = [*tokens[:6], 7, *tokens[7:], 8]
    assert pulled(p, edited, offer.without("remote_block_hashes")) == 0
    assert p.connector.reader.num_pulls_failed == {"hashes": 1}
    assert p.connector.reader.num_tokens_not_pulled == {("decode", "failed"): 14}
    settle_all(p, d, seconds=1)
    d.check_empty()


def test_a_request_parks_until_its_history_is_there_and_computes_only_the_rest() -> None:
    p, d, network = pair()
    tokens, offer = first_turn(p, d, prompt_of(10))
    forget(p)
    prompt = [*tokens, *prompt_of(6, 3)]
    request = p.submit(prompt, max_tokens=1, params=KVTransferParams.for_prefill(offer))
    assert p.scheduler.num_kv_fetch_by_stage["waiting_to_start"] == 1
    p.step()
    assert (request.status, request.num_computed_tokens) == (LOADING, 14)
    assert p.scheduler.num_kv_fetch_by_stage["in_progress"] == 1
    network.advance()
    p.run()
    assert p.answer(request) == expected_output(prompt, max_tokens=1)
    assert p.runner.num_computed[request.request_id] == len(prompt) - 14
    assert p.said(request).remote_prefill_pulled_tokens == 14
    assert p.scheduler.prompt_tokens_by_source["external_kv_transfer"] == 14
    assert p.transport.renewals == [], "an offer is not renewed"


def test_only_what_the_own_cache_lacks_is_pulled(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    tokens, offer = first_turn(p, d, prompt_of(10))
    assert pulled(p, [*tokens, 7], offer) == 14 - 8
    reader = p.connector.reader
    assert reader.num_tokens_not_pulled == {("decode", "cached"): 8}
    (pull,) = p.transport.pulls
    assert (pull.first_block, len(pull.remote_block_ids)) == (2, 2)
    settle_all(p, d, seconds=1)
    d.check_empty()


@pytest.mark.parametrize(("threshold", "num_pulled"), [(0, 6), (1, 6), (6, 6), (7, 0)])
def test_too_little_is_computed_again(threshold: int, num_pulled: int) -> None:
    p, d, _ = pair(prefill={"recompute_threshold": threshold})
    tokens, offer = first_turn(p, d, prompt_of(10))
    assert pulled(p, [*tokens, 7], offer) == num_pulled
    assert p.connector.reader.num_not_pulled == ({} if num_pulled else {"below_threshold": 1})
    settle_all(p, d, seconds=1)
    d.check_empty()


def test_the_threshold_is_not_for_what_prefill_computed() -> None:
    p, d, _ = pair(decode={"recompute_threshold": 1_000})
    request = d.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    d.run()
    assert request.num_external_tokens == 10


def test_a_full_hit_in_the_own_cache_needs_no_lease(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    tokens, offer = first_turn(p, d, prompt_of(10))
    p.submit(tokens, max_tokens=1)
    p.run()
    settle_all(p, d, seconds=OFFER_SECONDS)
    assert pulled(p, tokens[:13], offer) == 0
    assert p.connector.reader.num_not_pulled == {"cached": 1}
    assert not p.connector.reader.num_pulls_failed


@pytest.mark.parametrize("reason", ["layout", "self", "abandoned"])
def test_what_cannot_be_used_is_released_at_once(engines: tuple[FakeEngine, FakeEngine], reason: str) -> None:
    p, d = engines
    tokens, offer = first_turn(p, d, prompt_of(10))
    if reason == "layout":
        assert (
            pulled(p, tokens, offer.with_(kv_layout="another", remote_block_ids=[[0]], remote_block_hashes=None)) == 0
        )
    elif reason == "abandoned":
        p.abort(p.submit(tokens, params=KVTransferParams.for_prefill(offer)))
    else:
        offer = offer.with_(remote_engine_id="p", remote_host="p.test")
        assert pulled(p, tokens, offer) == 0
    assert p.connector.reader.num_not_pulled == {reason: 1}
    settle_all(p, d, seconds=1)
    if reason == "self":
        assert p.transport.releases[0][0].engine_id == "p"
    else:
        d.check_empty()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_num_tokens": None}, "remote_num_tokens"),
        ({"remote_num_tokens": 17}, "remote_num_tokens"),
        ({"remote_num_tokens": 12}, "remote_num_tokens"),
        ({"remote_block_ids": [[0, 1], [2]]}, "remote_block_ids"),
        ({"remote_block_hashes": ["00"]}, "remote_block_hashes"),
    ],
)
def test_an_offer_that_contradicts_itself_is_refused_by_name(
    engines: tuple[FakeEngine, FakeEngine], change: dict[str, object], param: str
) -> None:
    p, d = engines
    tokens, offer = first_turn(p, d, prompt_of(10))
    params = KVTransferParams.for_prefill(offer.with_(**change))
    with pytest.raises(WireError) as caught:
        p.connector.check(params)
    assert caught.value.param == f"kv_transfer_params.{param}"
    request = p.submit(tokens, params=params)
    p.collect()
    assert (p.final(request).finish_reason, p.final(request).error_status) == ("error", 400)
    p.check_idle()


def test_a_refused_leg_gives_the_offer_back(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    _, offer = first_turn(p, d, prompt_of(10))
    p.connector.reject(KVTransferParams.for_prefill(offer))
    settle_all(p, d, seconds=1)
    d.check_empty()


@pytest.mark.parametrize(
    "offer", [{}, {"remote_block_ids": None}, {"remote_block_ids": []}, {"remote_block_ids": [[]]}]
)
def test_a_leg_without_blocks_is_a_first_turn(engines: tuple[FakeEngine, FakeEngine], offer: dict[str, object]) -> None:
    p, _ = engines
    assert pulled(p, prompt_of(10), KVTransferParams(**offer)) == 0
    assert (p.transport.pulls, p.connector.reader.num_not_pulled) == ([], {})


# When it goes wrong


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("reason", ["handshake", "engine_id", "claim", "disconnected", "timeout", "transfer"])
def test_a_failed_pull_is_tried_once(policy: str, reason: str) -> None:
    p, d, network = pair(prefill={"policy": policy, "num_blocks": 16})
    tokens, offer = first_turn(p, d, prompt_of(10))
    forget(p)
    network.faults = lambda pull: Fault(fails=reason, before_done=1)
    other = p.submit(prompt_of(9, 5), max_tokens=8)
    request = p.submit([*tokens, 7], max_tokens=1, params=KVTransferParams.for_prefill(offer))
    p.run()
    assert p.answer(other) == expected_output(prompt_of(9, 5), max_tokens=8)
    assert len(p.transport.pulls) == 1
    if policy == "recompute":
        assert p.answer(request) == expected_output([*tokens, 7], max_tokens=1)
        assert p.said(request).remote_prefill_pulled_tokens == 0
    else:
        assert (p.final(request).finish_reason, p.final(request).error_status) == ("error", 500)
    settle_all(p, d)
    p.check_empty()
    d.check_idle()


def test_a_preempted_request_computes_what_it_had_pulled() -> None:
    p, d, network = pair(prefill={"num_blocks": 9, "max_num_batched_tokens": 6})
    tokens, offer = first_turn(p, d, prompt_of(10))
    forget(p)
    old = p.submit(prompt_of(9, 5), max_tokens=14)
    p.step()
    p.step()
    request = p.submit([*tokens, *prompt_of(7, 6)], max_tokens=2, params=KVTransferParams.for_prefill(offer))
    p.step()
    assert request.status is LOADING
    network.advance()
    p.run()
    assert request.num_preemptions == 1
    assert p.answer(request) == expected_output([*tokens, *prompt_of(7, 6)], max_tokens=2)
    assert p.answer(old) == expected_output(prompt_of(9, 5), max_tokens=14)
    assert len(p.transport.pulls) == 1


def test_an_offer_is_read_once(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    p2 = FakeEngine(network=p.network, role="prefill", name="p2")
    tokens, offer = first_turn(p, d, prompt_of(10))
    forget(p)
    assert pulled(p, [*tokens, 7], offer) == 14
    settle_all(p, d, seconds=1)
    assert pulled(p2, [*tokens, 8], offer) == 0
    assert d.leases.num_claims_refused == {"released": 1}


@pytest.mark.parametrize("offsets", [(1000.0, 0.0), (0.0, 1000.0), (-1000.0, 1000.0)])
def test_clocks_have_nothing_to_do_with_each_other(offsets: tuple[float, float]) -> None:
    p, d, network = pair(prefill={"clock_offset": offsets[0]}, decode={"clock_offset": offsets[1]})
    tokens, offer = first_turn(p, d, prompt_of(10))
    assert OFFER_SECONDS - 1 < (offer.remote_blocks_expiry_time or 0) - offsets[1] <= OFFER_SECONDS + 1
    forget(p)
    network.advance(OFFER_SECONDS - 10)
    assert pulled(p, [*tokens, 7], offer) == 14
    tokens, offer = first_turn(p, d, prompt_of(10, 1))
    forget(p)
    network.advance(OFFER_SECONDS)
    d.step()
    assert pulled(p, [*tokens, 7], offer) == 0
    held = p.prefill(prompt_of(10, 2))
    network.advance(LEASE_SECONDS)
    p.step()
    request = d.submit(prompt_of(10, 2), max_tokens=1, params=held)
    d.run()
    assert request.num_external_tokens == 0
    settle_all(p, d, seconds=CLAIM_SECONDS)
    p.check_empty()
    d.check_idle()


def test_ten_turns_compute_no_token_twice() -> None:
    p, d, _ = pair(prefill={"num_blocks": 100}, decode={"num_blocks": 100})
    history: list[int] = []
    offer = None
    for turn in range(10):
        prompt = [*history, *prompt_of(7, turn)]
        forget(p)
        before = [sum(engine.runner.num_computed.values()) for engine in (p, d)]
        held = p.prefill(prompt, offer=offer)
        computed = sum(p.runner.num_computed.values()) - before[0]
        answer, offer = d.decode(prompt, held, max_tokens=6)
        assert answer == expected_output(prompt, max_tokens=6)
        assert computed <= len(prompt) - len(history) + 1, "the new tokens, and the last one of the answer"
        assert sum(d.runner.num_computed.values()) - before[1] == 6
        history = [*prompt, *answer]
    settle_all(p, d, seconds=LEASE_SECONDS)
    p.check_empty()
    d.check_idle()
    assert len(d.leases) == 1


def test_an_engine_can_be_both_ways_with_others_and_itself() -> None:
    _, d, network = pair()
    both = FakeEngine(network=network, role="both", name="b")
    tokens, offer = first_turn(both, both, prompt_of(10))
    tokens, offer = first_turn(both, both, [*tokens, 7])
    assert both.connector.reader.num_not_pulled == {"self": 2}
    answer, elsewhere = d.decode([*tokens, 8], both.prefill([*tokens, 8], offer=offer), max_tokens=3)
    forget(both)
    assert pulled(both, [*tokens, 8, *answer, 9], elsewhere) == len(tokens) + 3
    assert isinstance(both.connector, KVConnector)
    settle_all(both, d)
    both.check_idle()
    d.check_idle()

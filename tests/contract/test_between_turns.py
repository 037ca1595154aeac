"""The KV of a conversation on its way back: a decode engine offers it, the next turn's prefill engine pulls it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from connectors.fake import Fault
from connectors.wire.transfer import KVTransferParams
from engine.request import RequestStatus
from tests.contract.talk import ASKS, Talk, after_one_turn, one_turn
from tests.fake_engines import CLAIM_SECONDS, OFFER_SECONDS, FakeEngine, pair, settle_all
from tests.fake_runner import BLOCK_SIZE, EOS, expected_output, prompt_ending_in, prompt_of

WAITING, LOADING, RUNNING = RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING
SKEWS = [(0.0, 0.0), (1000.0, -1000.0), (-1000.0, 1000.0)]
"""What the clocks of the prefill and the decode engine are ahead of the time."""


def stages(engine: FakeEngine) -> tuple[int, ...]:
    return tuple(engine.scheduler.num_kv_fetch_by_stage.values())


def test_item_01_next_turn_is_parked_until_its_history_is_there_and_then_handed_over() -> None:
    t = after_one_turn()
    request = t.ask(t.next_prompt)
    assert stages(t.p) == (1, 0, 0)
    assert t.p.step() is False
    assert (request.status, stages(t.p)) == (LOADING, (0, 1, 0))
    t.network.advance()
    t.p.settle()
    assert (request.status, stages(t.p)) == (WAITING, (0, 0, 1))
    t.p.run()
    assert t.p.final(request).finish_reason == "length"
    assert t.p.runner.num_computed[request.request_id] == len(t.next_prompt) - t.num_offered
    held = t.p.said(request)
    assert (held.remote_prefill_cached_tokens, held.remote_prefill_pulled_tokens) == (0, t.num_offered)
    t.network.advance()
    t.d.step()
    t.d.check_empty()
    assert len(t.p.leases) == 1
    t.check_turn(request)
    settle_all(t.p, t.d, seconds=OFFER_SECONDS + 1)
    t.p.check_empty()
    t.d.check_empty()


def test_item_02_first_turn_is_computed_at_once() -> None:
    t = after_one_turn()
    request = t.p.submit(t.next_prompt, max_tokens=2, params=KVTransferParams.for_prefill())
    assert t.p.step() is True
    assert request.status is RUNNING
    t.p.run()
    assert not t.p.transport.pulls
    assert t.p.runner.num_computed[request.request_id] == len(t.next_prompt) + 1


def test_item_03_abort_after_the_end_keeps_the_blocks() -> None:
    t = after_one_turn()
    request = t.ask(t.next_prompt)
    t.p.run()
    t.p.abort(request)
    settle_all(t.p, t.d, seconds=1)
    assert len(t.p.leases) == 1
    t.check_turn(request)


@pytest.mark.parametrize("status", [WAITING, LOADING, RUNNING])
def test_item_04_aborted_prefill_leaves_nothing_held_at_either_engine(status: RequestStatus) -> None:
    t = after_one_turn(prefill={"num_blocks": 8})
    if status is WAITING:
        t.p.submit(prompt_of(25, 1), max_tokens=3)
        t.p.step()
    request = t.ask(t.next_prompt, max_tokens=9)
    t.p.step()
    if status is RUNNING:
        t.network.advance()
        t.p.step()
    assert request.status is status
    t.p.abort(request)
    t.p.collect()
    assert (t.p.final(request).finish_reason, t.p.final(request).kv_transfer_params) == ("abort", None)
    assert (request.request_id in t.p.scheduler.loading) == (status is LOADING), "a read may still write to its blocks"
    assert (t.p.pool.num_used > 0) == (status is not RUNNING), "they are not given away meanwhile"
    assert len(t.p.leases) == 0
    t.p.run()
    settle_all(t.p, t.d, seconds=2)
    t.p.check_empty()
    t.d.check_empty()
    assert t.d.leases.num_ended == {"released": 1}


@pytest.mark.parametrize("num_prompt", [5, 8, 9, 12, 13, 14])
@pytest.mark.parametrize("hashes", [True, False])
def test_item_05_offer_longer_than_the_prompt_counts_no_further_than_the_prompt(num_prompt: int, hashes: bool) -> None:
    t = after_one_turn()
    request = t.ask(t.history[:num_prompt], t.offer if hashes else t.offer.without("remote_block_hashes"))
    t.p.step()
    assert request.num_computed_tokens <= num_prompt
    t.p.run()
    whole = num_prompt if num_prompt == t.num_offered else num_prompt // BLOCK_SIZE * BLOCK_SIZE
    assert request.num_external_tokens == whole
    assert t.p.runner.num_computed[request.request_id] == max(1, num_prompt - whole)
    t.check_turn(request)


def test_item_06_last_block_is_pulled_though_it_is_not_full() -> None:
    t = after_one_turn()
    assert t.num_offered % BLOCK_SIZE == 2
    request = t.ask(t.next_prompt)
    t.p.run()
    (pull,) = t.p.transport.pulls
    assert pull.remote_block_ids == tuple(t.offer.remote_block_ids[0])
    assert len(pull.local_block_ids) == 4
    assert request.num_external_tokens == 14
    t.check_turn(request)


def test_item_07_pull_names_the_owner_its_lease_and_its_blocks_as_the_offer_does() -> None:
    t = after_one_turn()
    t.ask(t.next_prompt)
    t.p.step()
    (pull,) = t.p.transport.pulls
    owner = (pull.peer.engine_id, pull.peer.host, pull.peer.port, pull.remote_request_id)
    offer = t.offer
    assert owner == (offer.remote_engine_id, offer.remote_host, offer.remote_port, offer.remote_request_id)
    assert [list(pull.remote_block_ids)] == offer.remote_block_ids
    assert list(pull.block_hashes) == offer.remote_block_hashes


def test_item_08_each_pull_is_sent_once_however_many_there_are() -> None:
    t = after_one_turn()
    others = [one_turn(t.d, 10, 5, seed=seed) for seed in (1, 2)]
    requests = [t.ask(t.next_prompt), *(t.ask([*history, *ASKS], offer) for history, offer in others)]
    t.p.step()
    assert [pull.request_id for pull in t.p.transport.pulls] == [request.request_id for request in requests]
    t.p.step()
    assert len(t.p.transport.pulls) == 3
    t.p.run()
    for request in requests:
        assert request.num_external_tokens == t.num_offered
        t.check_turn(request)


def test_item_10_what_was_pulled_is_served_on_and_freed_by_the_readers_notification() -> None:
    t = after_one_turn()
    request = t.ask(t.next_prompt)
    t.p.run()
    d2 = FakeEngine(network=t.network, role="decode", name="d2")
    t.network.faults = lambda pull: Fault(before_notify=1.0)
    answer, _ = d2.decode(t.next_prompt, t.p.said(request).for_decode(), max_tokens=5)
    assert answer == expected_output(t.next_prompt, max_tokens=5)
    (pull,) = d2.transport.pulls
    assert pull.remote_request_id == request.request_id
    assert d2.connector.reader.num_tokens_pulled["prefill"] == len(t.next_prompt)
    t.p.step()
    assert len(t.p.leases) == 1
    t.network.advance(1.0)
    t.p.step()
    t.p.check_empty()
    assert t.p.leases.num_ended == {"released": 1}


@pytest.mark.parametrize("how", ["stop", "length"])
@pytest.mark.parametrize("alone", [True, False])
def test_item_12_decode_answer_can_go_to_the_next_prefill_as_it_is(how: str, alone: bool) -> None:
    p, d, network = pair()
    prompt = prompt_ending_in(EOS) if how == "stop" else prompt_of(6)
    params = KVTransferParams.for_decode_alone() if alone else p.prefill(prompt)
    request = d.submit(prompt, max_tokens=4, ignore_eos=how == "length", params=params)
    d.run()
    assert d.final(request).finish_reason == how
    offer = d.said(request)
    assert (offer.do_remote_decode, offer.do_remote_prefill) == (True, False)
    assert (offer.remote_num_tokens or 0) > 0
    p2 = FakeEngine(network=network, role="prefill", name="p2")
    history = [*prompt, *d.answer(request)]
    second = p2.submit([*history, *ASKS], max_tokens=1, params=offer)
    p2.run()
    assert p2.said(second).do_remote_prefill
    assert second.num_external_tokens == len(history) - 1


def test_item_13_decode_keeps_the_blocks_until_a_deadline_and_in_its_cache_after_it() -> None:
    t = after_one_turn()
    (blocks,) = t.offer.remote_block_ids
    assert [t.d.pool.blocks[block].ref_count for block in blocks] == [1, 1, 1, 1]
    assert t.d.connector.next_wakeup() == t.d.clock() + OFFER_SECONDS
    t.network.advance(OFFER_SECONDS - 0.1)
    t.d.step()
    assert len(t.d.leases) == 1
    t.network.advance(0.1)
    t.d.step()
    t.d.check_empty()
    again = t.d.submit(t.next_prompt, max_tokens=2)
    t.d.run()
    assert again.num_cached_tokens == 12, "all that was full of tokens"


@pytest.mark.parametrize("num_answer", [1, 2, 3, 4, 5, 9])
def test_item_14_tokens_on_offer_are_those_that_were_computed(num_answer: int) -> None:
    t = after_one_turn(10, num_answer)
    (num_computed,) = t.d.runner.num_computed.values()
    assert t.offer.remote_num_tokens == num_computed == 10 + num_answer - 1


def test_item_15_tokens_on_offer_do_not_fill_a_partial_last_block() -> None:
    t = after_one_turn(9, 2)
    assert t.offer.remote_num_tokens == 10
    assert len(t.offer.remote_block_ids[0]) == 3
    t = after_one_turn(9, 4)
    assert (t.offer.remote_num_tokens, len(t.offer.remote_block_ids[0])) == (12, 3)


def test_item_16_preempted_after_its_pull_a_request_is_computed_and_not_pulled_again() -> None:
    t = after_one_turn(prefill={"num_blocks": 6, "max_num_seqs": 1})
    older = t.p.submit(prompt_of(3, 1), max_tokens=20)
    t.p.step()
    request = t.ask(t.next_prompt[:15])
    t.p.step()
    t.network.advance()
    t.p.run()
    assert (older.num_preemptions, request.num_preemptions) == (0, 1)
    assert len(t.p.transport.pulls) == 1
    assert request.num_external_tokens == 0, "what it holds now was computed here"
    assert t.p.answer(older) == expected_output(prompt_of(3, 1), max_tokens=20)
    t.check_turn(request)


@pytest.mark.parametrize("num_prompt", range(1, 2 * BLOCK_SIZE + 2))
def test_item_17_tokens_on_offer_fit_the_blocks_exactly(num_prompt: int) -> None:
    t = after_one_turn(num_prompt, 2)
    assert t.offer.remote_num_tokens == num_prompt + 1
    assert len(t.offer.remote_block_ids[0]) == -(-(num_prompt + 1) // BLOCK_SIZE)
    assert len(t.offer.remote_block_hashes or ()) == len(t.offer.remote_block_ids[0])
    request = t.ask(t.next_prompt)
    t.p.run()
    assert request.num_external_tokens == num_prompt + 1
    t.check_turn(request)


@pytest.mark.parametrize(
    ("threshold", "num_local", "pulled"), [(0, 0, 14), (14, 0, 14), (15, 0, 0), (6, 8, 6), (7, 8, 0), (0, 12, 2)]
)
def test_item_18_fewer_tokens_than_the_threshold_are_computed_and_their_blocks_released(
    threshold: int, num_local: int, pulled: int
) -> None:
    t = after_one_turn(prefill={"recompute_threshold": threshold})
    t.p.submit(t.history[: num_local + 1], max_tokens=1)
    t.p.run()
    request = t.ask(t.next_prompt, max_tokens=2)
    t.p.step()
    assert request.status is (LOADING if pulled else RUNNING)
    t.p.run()
    assert (request.num_cached_tokens, request.num_external_tokens) == (num_local, pulled)
    assert len(t.p.transport.pulls) == bool(pulled)
    assert t.p.connector.reader.num_not_pulled == ({} if pulled else {"below_threshold": 1})
    settle_all(t.p, t.d, seconds=1)
    t.d.check_empty()
    t.check_turn(request)


@pytest.mark.parametrize(
    "nothing",
    [{}, {"remote_block_ids": None}, {"remote_block_ids": []}, {"remote_block_ids": [[]], "remote_num_tokens": 0}],
)
def test_item_20_prefill_without_blocks_to_pull_never_parks(nothing: dict[str, Any]) -> None:
    t = after_one_turn()
    params = KVTransferParams(do_remote_decode=True, do_remote_prefill=False, **nothing)
    request = t.p.submit(t.next_prompt, max_tokens=1, params=params)
    assert t.p.step() is True
    t.p.run()
    assert (t.p.transport.pulls, t.p.transport.releases) == ([], [])
    t.check_turn(request)


@pytest.mark.parametrize(("num_same", "pulled"), [(3, 0), (4, 4), (9, 8), (12, 12), (13, 12), (14, 14), (15, 14)])
def test_item_21_only_what_the_prompt_shares_is_pulled_and_the_rest_computed(num_same: int, pulled: int) -> None:
    t = after_one_turn()
    prompt = [*t.history[:num_same], 49 - t.next_prompt[num_same], *prompt_of(8, 1)]
    request = t.ask(prompt)
    t.p.run()
    assert request.num_external_tokens == pulled
    assert t.p.runner.num_computed[request.request_id] == len(prompt) - pulled
    settle_all(t.p, t.d, seconds=1)
    t.d.check_empty()
    t.check_turn(request)


def test_item_22_that_an_offer_was_used_is_remembered_outside_the_params() -> None:
    t = after_one_turn()
    request = t.ask(t.next_prompt)
    params = request.kv_transfer_params
    before = params.to_json()
    t.p.step()
    assert t.p.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    t.p.run()
    assert request.kv_transfer_params is params
    assert params.to_json() == before


def skewed(skew: tuple[float, float], **prefill: Any) -> Talk:
    return after_one_turn(prefill={"clock_offset": skew[0], **prefill}, decode={"clock_offset": skew[1]})


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("said", ["as it is", "far away", "long past", "not at all"])
def test_item_23_whether_an_offer_still_stands_is_for_its_owner_to_say(skew: tuple[float, float], said: str) -> None:
    """The deadline in the params is of another machine's clock; the claim is judged by the owner's own."""
    for age, stands in ((OFFER_SECONDS - 0.5, True), (OFFER_SECONDS, False)):
        t = skewed(skew)
        offer = t.offer
        if said == "not at all":
            offer = offer.without("remote_blocks_expiry_time", "remote_blocks_ttl")
        elif said != "as it is":
            offer = offer.with_(remote_blocks_expiry_time=1e9 if said == "far away" else -1e9)
        t.network.advance(age)
        request = t.ask(t.next_prompt, offer)
        t.p.run()
        assert request.num_external_tokens == (t.num_offered if stands else 0)
        assert t.p.runner.num_computed[request.request_id] == len(t.next_prompt) - (t.num_offered if stands else 0)
        assert t.d.leases.num_claims_refused == ({} if stands else {"expired": 1})
        assert t.p.connector.reader.num_pulls_failed == ({} if stands else {"claim": 1})
        t.check_turn(request)
        settle_all(t.p, t.d, seconds=1)
        t.p.check_idle()
        t.d.check_idle()


def test_item_23_pull_that_begins_before_the_deadline_may_end_after_it() -> None:
    """A claim is good for a time of its own, so no margin is needed, and what it read is right."""
    t = after_one_turn(decode={"num_blocks": 8})
    t.network.faults = lambda pull: Fault(before_read=CLAIM_SECONDS - 1)
    t.network.advance(OFFER_SECONDS - 0.5)
    request = t.ask(t.next_prompt)
    t.p.step()
    t.network.advance(1.0)
    greedy = t.d.submit(prompt_of(20, 1), max_tokens=1)
    assert t.d.step() is False, "the claimed blocks are not given away"
    t.p.run()
    assert request.num_external_tokens == t.num_offered
    t.d.run()
    assert t.d.answer(greedy) == expected_output(prompt_of(20, 1), max_tokens=1)
    t.check_turn(request)


@pytest.mark.parametrize("age", [0.0, OFFER_SECONDS])
def test_item_24_what_the_own_cache_has_is_not_asked_for_however_old_the_offer(age: float) -> None:
    t = after_one_turn()
    prompt = t.history[:13]
    t.p.submit(prompt, max_tokens=1)
    t.p.run()
    t.network.advance(age)
    request = t.ask(prompt)
    t.p.run()
    assert request.num_cached_tokens == 12, "all but the token that is computed anyway"
    assert (t.p.transport.pulls, t.d.leases.num_claims_refused) == ([], Counter())
    settle_all(t.p, t.d, seconds=1)
    t.d.check_empty()
    assert t.d.leases.num_ended == {"expired" if age else "released": 1}
    t.check_turn(request)


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_item_25_deadline_of_an_offer_lies_ahead_on_its_owners_clock(offset: float) -> None:
    t = after_one_turn(decode={"clock_offset": offset})
    assert t.offer.remote_blocks_expiry_time == t.d.clock() + OFFER_SECONDS
    assert t.offer.remote_blocks_ttl == OFFER_SECONDS


def test_item_25_deadline_of_a_hand_over_is_not_told() -> None:
    assert after_one_turn().p.prefill(prompt_of(10)).remote_blocks_expiry_time is None

"""Blocks that wait for a next turn are nobody's hostages: an active request takes them, a reader's claim keeps them."""

from __future__ import annotations

import pytest

from connectors.fake import Fault
from connectors.lease import Claim
from connectors.transport import LeaseReleased
from connectors.wire.transfer import KVTransferParams
from engine.request import RequestStatus
from tests.fake_engines import CLAIM_SECONDS, OFFER_SECONDS, FakeEngine, pair, settle_all
from tests.fake_runner import expected_output, prompt_of

ALONE = KVTransferParams.for_decode_alone()


def offer(d: FakeEngine, length: int, seed: int) -> KVTransferParams:
    """Run a turn whose blocks stay on offer; `length` is that of prompt and answer."""
    return d.decode(prompt_of(length - 3, seed), ALONE, max_tokens=4)[1]


@pytest.fixture
def d() -> FakeEngine:
    """12 blocks of 4 tokens."""
    return pair(decode={"num_blocks": 12})[1]


def claim(d: FakeEngine, held: KVTransferParams) -> Claim:
    claim = d.leases.claim(str(held.remote_request_id))
    assert isinstance(claim, Claim)
    return claim


def lease_alive(d: FakeEngine, held: KVTransferParams) -> bool:
    return d.leases.fate(str(held.remote_request_id)) is None


def test_room_is_taken_from_the_oldest_and_no_more_than_needed(d: FakeEngine) -> None:
    first, second, third = (offer(d, 16, seed) for seed in range(3))
    assert (d.pool.num_free, d.pool.num_idle, d.pool.usage) == (0, 12, 0)
    request = d.submit(prompt_of(16, 9), max_tokens=1)
    assert d.step()
    assert request.status.finished
    assert [lease_alive(d, each) for each in (first, second, third)] == [False, True, True]
    assert d.leases.num_ended == {"revoked": 1}
    d.submit(prompt_of(12, 8), max_tokens=1)
    d.run()
    assert lease_alive(d, second), "the blocks of the request that ended are enough"


def test_a_revoked_conversation_stays_in_the_prefix_cache_until_its_blocks_are_used(d: FakeEngine) -> None:
    offer(d, 24, 1)
    offer(d, 24, 2)
    d.submit(prompt_of(8, 9), max_tokens=1)
    d.run()
    again = d.submit(prompt_of(21, 1), max_tokens=1)
    d.run()
    assert again.num_cached_tokens == 16, "two of its six blocks were needed, from its end"


def test_running_requests_take_room_before_anybody_is_preempted(d: FakeEngine) -> None:
    held = offer(d, 16, 1)
    requests = [d.submit(prompt_of(10, seed), max_tokens=13) for seed in (2, 3)]
    d.run()
    assert not lease_alive(d, held)
    assert d.scheduler.num_preemptions == 0
    for request, seed in zip(requests, (2, 3), strict=True):
        assert d.answer(request) == expected_output(prompt_of(10, seed), max_tokens=13)


def test_nothing_is_revoked_if_it_would_not_do(d: FakeEngine) -> None:
    held = offer(d, 16, 1)
    busy = d.submit(prompt_of(28, 2), max_tokens=4)
    d.step()
    waits = d.submit(prompt_of(40, 3), max_tokens=1)
    d.step()
    assert waits.status is RequestStatus.WAITING
    assert lease_alive(d, held), "with it there would be 4 blocks, 10 are needed"
    d.run()
    assert not lease_alive(d, held)
    assert busy.num_preemptions == 0


def test_a_running_request_revokes_nothing_if_it_must_preempt_anyway(d: FakeEngine) -> None:
    held = offer(d, 16, 1)
    d.submit(prompt_of(28, 2), max_tokens=4)
    d.step()
    assert (d.pool.num_free, d.pool.num_idle) == (1, 4)
    assert d.scheduler.tables.reclaim(6) is False
    assert lease_alive(d, held)
    assert d.scheduler.tables.reclaim(5) is True
    assert not lease_alive(d, held)


def test_a_request_finds_its_start_in_the_lease_that_it_ends(d: FakeEngine) -> None:
    held = offer(d, 24, 1)
    offer(d, 20, 2)
    longer = [*prompt_of(21, 1), *prompt_of(7, 5)]
    request = d.submit(longer, max_tokens=1)
    d.step()
    assert request.num_cached_tokens == 20
    assert d.answer(request) == expected_output(longer, max_tokens=1)
    assert not lease_alive(d, held)


def test_blocks_shared_by_two_leases_are_room_once_both_are_gone() -> None:
    d = pair(decode={"num_blocks": 8})[1]
    first = offer(d, 24, 1)
    second = d.decode(prompt_of(21, 1), ALONE, max_tokens=5)[1]
    shared = set((first.remote_block_ids or [[]])[0]) & set((second.remote_block_ids or [[]])[0])
    assert len(shared) == 5
    assert (d.pool.num_free, d.pool.num_idle) == (0, 8)
    d.submit(prompt_of(28, 9), max_tokens=1)
    assert d.step()
    assert (lease_alive(d, first), lease_alive(d, second)) == (False, False)
    d.check_empty()


def test_blocks_a_request_uses_are_not_room_though_they_are_on_offer(d: FakeEngine) -> None:
    held = offer(d, 36, 1)
    user = d.submit(prompt_of(33, 1), max_tokens=6)
    d.step()
    assert user.num_cached_tokens == 32
    assert d.pool.num_idle == 1
    waits = d.submit(prompt_of(16, 2), max_tokens=1)
    d.step()
    assert waits.status is RequestStatus.WAITING
    assert lease_alive(d, held), "revoking it would give room for one block of four"
    d.run()
    assert d.answer(waits) == expected_output(prompt_of(16, 2), max_tokens=1)


def test_a_request_waits_for_a_claim_and_is_woken_when_it_ends(d: FakeEngine) -> None:
    held = offer(d, 40, 1)
    claim(d, held)
    request = d.submit(prompt_of(20, 2), max_tokens=1)
    assert d.step() is False
    assert (d.pool.num_idle, d.leases.num_pinned_blocks) == (0, 10)
    assert d.connector.next_wakeup() == d.network.clock.now + CLAIM_SECONDS
    d.events.append(LeaseReleased(str(held.remote_request_id)))
    assert d.step()
    assert d.answer(request) == expected_output(prompt_of(20, 2), max_tokens=1)


def test_a_claim_whose_reader_died_ends_by_itself(d: FakeEngine) -> None:
    claim(d, offer(d, 40, 1))
    request = d.submit(prompt_of(20, 2), max_tokens=1)
    assert d.step() is False
    d.network.advance(CLAIM_SECONDS)
    assert d.step()
    assert request.status.finished
    d.check_empty()


def claim_during_schedule(d: FakeEngine, held: KVTransferParams) -> None:
    """A reader claims after the scheduler has looked for claims, and before it revokes."""
    revoke = d.connector.revoke

    def late():
        if lease_alive(d, held):
            d.leases.claim(str(held.remote_request_id))
        return revoke()

    d.connector.revoke = late


def test_a_claim_in_the_middle_of_an_admission_makes_it_wait(d: FakeEngine) -> None:
    start = offer(d, 12, 3)
    held = offer(d, 36, 1)
    claim(d, start)
    claim_during_schedule(d, held)
    prompt = [*prompt_of(9, 3), *prompt_of(8, 4)]
    request = d.submit(prompt, max_tokens=1)
    assert d.step() is False
    assert (request.status, request.block_ids) == (RequestStatus.WAITING, [])
    assert lease_alive(d, held)
    settle_all(d, seconds=CLAIM_SECONDS)
    d.run()
    assert d.answer(request) == expected_output(prompt, max_tokens=1)
    d.check_empty()


def test_a_claim_in_the_middle_of_a_step_preempts_the_youngest(d: FakeEngine) -> None:
    held = offer(d, 16, 1)
    old, young = (d.submit(prompt_of(13, seed), max_tokens=11) for seed in (2, 3))
    d.step()
    claim_during_schedule(d, held)
    d.run()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    for request, seed in ((old, 2), (young, 3)):
        assert d.answer(request) == expected_output(prompt_of(13, seed), max_tokens=11)
    assert lease_alive(d, held) or d.leases.fate(str(held.remote_request_id)) == "expired"


def test_a_pull_between_claim_and_revocation_reads_what_was_on_offer() -> None:
    p, d, network = pair(prefill={"num_blocks": 40}, decode={"num_blocks": 12})
    network.faults = lambda pull: Fault(before_claim=1, before_read=1, before_done=1)
    answer, held = d.decode(prompt_of(17), ALONE, max_tokens=4)
    prompt = [*prompt_of(17), *answer, 7]
    request = p.submit(prompt, max_tokens=1, params=KVTransferParams.for_prefill(held))
    p.step()
    network.advance(1)
    rival = d.submit(prompt_of(40, 2), max_tokens=1)
    d.step()
    assert rival.status is RequestStatus.WAITING, "a reader is at work"
    network.advance(2)
    p.run()
    assert request.num_external_tokens == 20
    assert p.answer(request) == expected_output(prompt, max_tokens=1)
    d.run()
    assert d.answer(rival) == expected_output(prompt_of(40, 2), max_tokens=1)


def test_a_pull_after_the_revocation_is_computed_instead() -> None:
    p, d, network = pair(prefill={"num_blocks": 40}, decode={"num_blocks": 12})
    network.faults = lambda pull: Fault(before_claim=1)
    answer, held = d.decode(prompt_of(17), ALONE, max_tokens=4)
    prompt = [*prompt_of(17), *answer, 7]
    request = p.submit(prompt, max_tokens=1, params=KVTransferParams.for_prefill(held))
    p.step()
    d.submit(prompt_of(40, 2), max_tokens=1)
    assert d.step()
    p.run()
    assert request.num_external_tokens == 0
    assert p.answer(request) == expected_output(prompt, max_tokens=1)
    assert d.leases.num_claims_refused == {"revoked": 1}
    assert p.connector.reader.num_pulls_failed == {"claim": 1}


def test_leases_that_end_unread_give_their_room_back(d: FakeEngine) -> None:
    held = offer(d, 16, 1)
    offer(d, 16, 2)
    assert d.leases.cancel(str(held.remote_request_id))
    d.submit(prompt_of(30, 3), max_tokens=1)
    assert d.step(), "what is given back can be revoked before the engine hears of it"
    d.events.append(LeaseReleased(str(held.remote_request_id)))
    d.step()
    assert d.connector.owner.num_released_unknown == 0
    d.network.advance(OFFER_SECONDS)
    d.step()
    d.check_empty()


def load(d: FakeEngine, params: KVTransferParams | None) -> list[list[tuple[str, int]]]:
    """200 conversations of one turn, arriving faster than they can be served; the steps it took."""
    for n in range(200):
        length = 20 + n * 37 % 90
        d.submit(prompt_of(length, n), max_tokens=3 + n % 9, request_id=f"c{n}", params=params)
        d.step()
    d.run()
    return d.runner.batches


@pytest.mark.parametrize(("max_num_seqs", "preempts"), [(2, False), (8, True)])
def test_conversations_that_never_return_hold_nobody_up(max_num_seqs: int, preempts: bool) -> None:
    """The same steps as if nothing had been kept: no request waits, or is preempted, for an idle lease."""
    kept, free = (pair(decode={"num_blocks": 64, "max_num_seqs": max_num_seqs})[1] for _ in range(2))
    steps, steps_if_free = load(kept, ALONE), load(free, None)
    assert (kept.leases.num_granted, free.leases.num_granted) == (200, 0)
    assert kept.leases.num_ended["revoked"] > 150
    if preempts:
        # Who is preempted may find less of its own in the prefix cache: what is on offer is kept for longer.
        assert len(steps) <= len(steps_if_free) * 1.02
        assert 0 < kept.scheduler.num_preemptions <= free.scheduler.num_preemptions * 1.1
    else:
        assert steps == steps_if_free
        assert kept.scheduler.num_preemptions == free.scheduler.num_preemptions == 0
    kept.check_idle()
    kept.network.advance(OFFER_SECONDS)
    kept.step()
    kept.check_empty()

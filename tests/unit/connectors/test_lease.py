from __future__ import annotations

import threading

import pytest

from connectors.fake import FakeClock
from connectors.lease import Claim, ClaimRefused, Leases


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def leases(clock: FakeClock) -> Leases:
    leases = Leases(claim_seconds=20, clock=clock)
    leases.hold("a", [3, 1, 2], ["aa", "bb", "cc"], 30)
    return leases


def test_release_ends_a_lease_once(leases: Leases) -> None:
    assert (len(leases), leases.num_blocks) == (1, 3)
    assert leases.release("a") == (3, 1, 2)
    assert leases.release("a") is None
    assert leases.next_expiry() is None


def test_a_lease_runs_out_at_its_time_exactly(leases: Leases) -> None:
    assert leases.next_expiry() == 30
    assert leases.expire(29.9) == []
    assert leases.expire(30) == [("a", (3, 1, 2))]
    assert leases.expire(30) == []


def test_shorter_leases_behind_longer_ones_run_out_first(leases: Leases) -> None:
    leases.hold("b", [7], ["dd"], 5)
    assert leases.expire(5) == [("b", (7,))]
    assert leases.next_expiry() == 30


def test_a_heartbeat_renews_for_the_whole_duration(leases: Leases, clock: FakeClock) -> None:
    clock.now = 10
    assert leases.renew(["a", "unknown"]) == 1
    assert leases.next_expiry() == 40
    clock.now = 40
    assert leases.renew(["a"]) == 0, "too late, though not yet reaped"


def test_a_claim_replaces_the_lease_time(leases: Leases, clock: FakeClock) -> None:
    clock.now = 29
    claim = leases.claim("a")
    assert isinstance(claim, Claim)
    assert (claim.valid_for, claim.block_ids, claim.block_hashes) == (20, (3, 1, 2), ("aa", "bb", "cc"))
    assert leases.next_expiry() == 49
    leases.renew(["a"])
    assert leases.next_expiry() == 49, "a heartbeat does not extend a claim"


def test_a_claim_may_end_before_the_lease_would_have(leases: Leases, clock: FakeClock) -> None:
    leases.claim("a")
    assert leases.next_expiry() == 20


def test_only_one_reader_may_claim(leases: Leases) -> None:
    leases.claim("a")
    assert leases.claim("a") == ClaimRefused("claimed")


def test_what_ran_out_cannot_be_claimed(leases: Leases, clock: FakeClock) -> None:
    clock.now = 30
    assert leases.claim("a") == ClaimRefused("expired")
    assert leases.claim("unknown") == ClaimRefused("expired")


def test_cancelling_refuses_later_claims_and_spares_earlier_ones(leases: Leases) -> None:
    leases.hold("b", [7], ["dd"], 30)
    leases.claim("b")
    assert leases.cancel("a") is True
    assert leases.cancel("a") is False
    assert leases.claim("a") == ClaimRefused("cancelled")
    assert leases.cancel("b") is False, "its reader may be at work"
    assert leases.release("a") == (3, 1, 2)


def test_blocks_that_hold_nothing_are_kept_but_not_offered(leases: Leases) -> None:
    leases.hold("b", [7, 8, 9], ["dd"], 30)
    claim = leases.claim("b")
    assert isinstance(claim, Claim)
    assert (claim.block_ids, claim.block_hashes) == ((7,), ("dd",))
    assert leases.release("b") == (7, 8, 9)


def test_only_the_holder_of_a_claim_can_give_it_back(leases: Leases) -> None:
    leases.hold("b", [7], ["dd"], 30)
    claim, other = leases.claim("a"), leases.claim("b")
    assert isinstance(claim, Claim)
    assert isinstance(other, Claim)
    assert leases.cancel("a") is False
    assert leases.cancel("a", other.claim_id) is False
    assert leases.cancel("a", claim.claim_id) is True
    assert leases.cancel("a", claim.claim_id) is False, "one release"
    assert leases.release("a") == (3, 1, 2)
    leases.hold("c", [8], ["ee"], 30)
    assert leases.cancel("c", claim.claim_id) is False, "not claimed"


def test_one_of_many_threads_gets_the_claim(leases: Leases) -> None:
    barrier, answers = threading.Barrier(8), []

    def claim() -> None:
        barrier.wait(5)
        answers.append(leases.claim("a"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sum(isinstance(answer, Claim) for answer in answers) == 1
    assert len(answers) == 8

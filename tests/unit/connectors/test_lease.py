from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from connectors.fake import FakeClock
from connectors.lease import NUM_ENDED_REMEMBERED, Claim, ClaimRefused, Ended, Leases


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def leases(clock: FakeClock) -> Leases:
    leases = Leases(claim_seconds=20, clock=clock)
    leases.hold("a", [3, 1, 2], ["aa", "bb", "cc"], 30)
    return leases


def test_release_ends_a_lease_once(leases: Leases) -> None:
    assert (len(leases), leases.num_pinned_blocks) == (1, 3)
    assert leases.release("a") == Ended("a", (3, 1, 2), idle=False)
    assert leases.release("a") is None
    assert (len(leases), leases.num_pinned_blocks) == (0, 0)
    assert leases.next_expiry() is None


def test_a_lease_runs_out_at_its_time_exactly(leases: Leases) -> None:
    assert leases.next_expiry() == 30
    assert leases.expire(29.9) == []
    assert leases.expire(30) == [Ended("a", (3, 1, 2), idle=False)]
    assert leases.expire(30) == []


def test_shorter_leases_behind_longer_ones_run_out_first(leases: Leases) -> None:
    leases.hold("b", [7], ["dd"], 5)
    assert leases.expire(5) == [Ended("b", (7,), idle=False)]
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
    assert leases.release("a") == Ended("a", (3, 1, 2), idle=False)


def test_blocks_that_hold_nothing_are_kept_but_not_offered(leases: Leases) -> None:
    leases.hold("b", [7, 8, 9], ["dd"], 30)
    claim = leases.claim("b")
    assert isinstance(claim, Claim)
    assert (claim.block_ids, claim.block_hashes) == ((7,), ("dd",))
    assert leases.release("b") == Ended("b", (7, 8, 9), idle=False)


def test_only_the_holder_of_a_claim_can_give_it_back(leases: Leases) -> None:
    leases.hold("b", [7], ["dd"], 30)
    claim, other = leases.claim("a"), leases.claim("b")
    assert isinstance(claim, Claim)
    assert isinstance(other, Claim)
    assert leases.cancel("a") is False
    assert leases.cancel("a", other.claim_id) is False
    assert leases.cancel("a", claim.claim_id) is True
    assert leases.cancel("a", claim.claim_id) is False, "one release"
    assert leases.release("a") == Ended("a", (3, 1, 2), idle=False)
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


def test_the_oldest_idle_lease_is_revoked_first(leases: Leases) -> None:
    for name, block_id in (("b", 5), ("c", 6)):
        leases.hold(name, [block_id], ["dd"], 480, revocable=True)
    assert (leases.num_pinned_blocks, leases.num_idle) == (3, 2)
    assert leases.revoke_oldest() == Ended("b", (5,), idle=True)
    assert leases.claim("b") == ClaimRefused("revoked")
    assert leases.revoke_oldest() == Ended("c", (6,), idle=True)
    assert leases.revoke_oldest() is None, "a reader is on its way to the one that is left"
    assert leases.num_ended == {"revoked": 2}
    assert leases.release("b") is None
    assert leases.fate("b") == "revoked"


def test_a_claim_keeps_a_lease_from_being_revoked(leases: Leases, clock: FakeClock) -> None:
    leases.hold("b", [5], ["dd"], 480, revocable=True)
    claim = leases.claim("b")
    assert isinstance(claim, Claim)
    assert (leases.num_claimed, leases.num_pinned_blocks, leases.num_idle) == (1, 4, 0)
    assert leases.revoke_oldest() is None
    assert leases.next_expiry() == 20
    assert leases.take_claimed() == [(5,)]
    assert leases.take_claimed() == []
    assert leases.cancel("b", claim.claim_id) is True
    assert leases.revoke_oldest() is None, "the engine has not heard of it yet"
    assert leases.release("b") == Ended("b", (5,), idle=False)
    assert (leases.num_claimed, leases.num_pinned_blocks) == (0, 3)
    assert leases.claim("b") == ClaimRefused("released")


def test_a_claim_that_the_engine_was_not_told_of_ends_as_idle(leases: Leases, clock: FakeClock) -> None:
    for name in "bc":
        leases.hold(name, [5], ["dd"], 480, revocable=True)
        leases.claim(name)
    assert leases.release("b") == Ended("b", (5,), idle=True)
    clock.now = 20
    assert leases.expire(20) == [Ended("c", (5,), idle=True)]
    assert leases.take_claimed() == []


def test_a_revocable_lease_is_not_renewed(leases: Leases, clock: FakeClock) -> None:
    leases.hold("b", [5], ["dd"], 15, revocable=True)
    clock.now = 10
    assert leases.renew(["b"]) == 1
    assert leases.next_expiry() == 15
    assert leases.expire(15) == [Ended("b", (5,), idle=True)]


def test_refusals_are_counted_by_reason(leases: Leases, clock: FakeClock) -> None:
    leases.hold("b", [5], ["dd"], 480, revocable=True)
    leases.revoke_oldest()
    leases.claim("a")
    for name in ("a", "b", "unknown"):
        leases.claim(name)
    leases.hold("c", [5], ["dd"], 480)
    leases.cancel("c")
    leases.claim("c")
    assert leases.num_claims_refused == {"claimed": 1, "revoked": 1, "expired": 1, "cancelled": 1}
    assert leases.num_claims == 1


def test_what_ended_long_ago_is_forgotten(leases: Leases) -> None:
    for n in range(NUM_ENDED_REMEMBERED + 1):
        leases.hold(f"b{n}", [5], ["dd"], 480, revocable=True)
        leases.revoke_oldest()
    assert leases.claim("b0") == ClaimRefused("expired")
    assert leases.claim("b1") == ClaimRefused("revoked")


def test_each_claim_is_announced() -> None:
    announced = []
    leases = Leases(claim_seconds=20, on_claim=lambda: announced.append(leases.num_claimed), clock=FakeClock())
    leases.hold("a", [1], ["aa"], 30)
    leases.claim("a")
    leases.claim("a")
    assert announced == [1], "when it is in force, and only if granted"


def test_expiry_follows_a_plain_model(clock: FakeClock) -> None:
    leases, rng = Leases(claim_seconds=7, clock=clock), random.Random(4)
    ends: dict[str, float] = {}
    renewable: dict[str, float] = {}
    for n in range(3_000):
        clock.now += rng.choice([0, 0, 0.5, 2])
        due = {name for name, at in ends.items() if at <= clock.now}
        assert {ended.request_id for ended in leases.expire(clock.now)} == due
        for name in due:
            del ends[name]
            renewable.pop(name, None)
        match rng.choice(["hold", "hold", "claim", "renew", "release"]), rng.choice([*ends, "none"]):
            case "hold", _:
                seconds, revocable = rng.choice([3, 10, 40]), rng.random() < 0.5
                leases.hold(f"r{n}", [1], ["aa"], seconds, revocable=revocable)
                ends[f"r{n}"] = clock.now + seconds
                if not revocable:
                    renewable[f"r{n}"] = seconds
            case "claim", name:
                if isinstance(leases.claim(name), Claim):
                    ends[name] = clock.now + 7
                    renewable.pop(name, None)
            case "renew", name:
                leases.renew([name])
                if name in renewable:
                    ends[name] = max(ends[name], clock.now + renewable[name])
            case "release", name:
                assert (leases.release(name) is not None) == (name in ends)
                ends.pop(name, None)
                renewable.pop(name, None)
        assert leases.next_expiry() == min(ends.values(), default=None)
        assert len(leases._queue) <= 4 * len(leases) + 65, "what has ended is not kept until its time would have come"


def test_thousands_of_leases_cost_an_engine_step_nothing() -> None:
    clock = FakeClock()
    leases = Leases(claim_seconds=20, clock=clock)
    for n in range(20_000):
        leases.hold(f"b{n}", [n], ["dd"], 480 + n / 1000, revocable=True)
    started = time.thread_time()
    for _ in range(10_000):
        leases.expire(clock.now)
        leases.next_expiry()
        leases.take_claimed()
    # A scan of the leases would take minutes.
    assert time.thread_time() - started < 2.0


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads take turns every few operations, so that they meet in the gaps."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless_threads")
def test_blocks_of_a_claim_are_not_given_away_while_it_is_valid() -> None:
    """Readers claim, give back, are done and die; the engine holds, revokes and expires, all at once."""
    leases = Leases(claim_seconds=0.02)
    over = threading.Event()
    contents = [""] * 64
    """Whose blocks they are: a reader under a claim must find its lease's name in each."""
    held: list[tuple[str, tuple[int, ...]]] = []
    done: list[str] = []
    errors: list[str] = []
    outcomes: set[str] = set()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            if over.wait(0.0005 * rng.random()) or not held:
                continue
            name, blocks = held[rng.randrange(len(held))]
            sent_at = time.monotonic()
            claim = leases.claim(name)
            if isinstance(claim, ClaimRefused):
                outcomes.add(claim.reason)
                continue
            for _ in range(rng.choice([0, 20, 500])):
                found = {contents[block_id] for block_id in blocks}
                if time.monotonic() - sent_at < claim.valid_for and found != {name}:
                    errors.append(f"{name}: {found}")
            match rng.randrange(4):
                case 0:
                    leases.cancel(name, claim.claim_id)
                    done.append(name)
                case 1:
                    outcomes.add("dies")
                case _:
                    done.append(name)

    def own() -> None:
        rng, free = random.Random(0), set(range(64))
        for n in itertools.count():
            if over.wait(0.0005 * rng.random()):
                return
            while len(free) < 4:
                ended = leases.expire(time.monotonic())
                outcomes.update("expires" for _ in ended)
                if done:
                    ended += [released for released in [leases.release(done.pop())] if released is not None]
                if rng.random() < 0.5 and (revoked := leases.revoke_oldest()) is not None:
                    ended.append(revoked)
                    outcomes.add("is revoked")
                for each in ended:
                    free |= set(each.block_ids)
                    for block_id in each.block_ids:
                        contents[block_id] = "recycled"
            blocks = tuple(rng.sample(sorted(free), 4))
            free -= set(blocks)
            for block_id in blocks:
                contents[block_id] = f"r{n}"
            leases.hold(f"r{n}", blocks, ["aa"] * 4, rng.choice([0.005, 480, 480]), revocable=rng.random() < 0.9)
            held.append((f"r{n}", blocks))
            del held[:-16]

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    threads.append(threading.Thread(target=own))
    for thread in threads:
        thread.start()
    started, seen = time.monotonic(), {"revoked", "claimed", "expires", "is revoked", "dies"}
    while not errors and time.monotonic() - started < (1.0 if seen <= outcomes else 30.0):
        over.wait(0.02)
    over.set()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert seen <= outcomes
    assert leases.num_claims > 20

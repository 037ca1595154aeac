"""Leases: finished blocks that another engine may still read, and for how long.

The reader names the lease in three calls: *claim* before it reads, *release* (a notification that comes with the
read) when it has the data, *renew* while its request still queues. The answer to a claim says what the blocks hold,
for the reader to compare. A claimed lease ends by release or `claim_seconds` after the claim arrived; since the reader
counts the same span from before it sent the claim, and throws away what was not complete by then, recycled memory may
be read but is never used.

A lease for a reader that is on its way (prefill's, for the decode engine) stands until it runs out. One for a reader
that may never come (decode's, for the conversation's next turn) is *revocable*: as long as nobody has claimed it, it is
*idle*, and whoever needs the room takes the oldest. Claim and revocation exclude each other under one lock.

Blocks return to their pool on the engine's main thread only: it alone calls `hold`, `release`, `expire`, `take_claimed`
and `revoke_oldest`. The HTTP and transfer threads call `claim`, `renew` and `cancel`.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

NUM_ENDED_REMEMBERED = 4096
"""Leases that lately ended, to tell a late reader from an unknown one, and why."""

Fate = Literal["released", "expired", "revoked"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Leave to read."""

    valid_for: float
    """Seconds, to be counted from when the claim was sent."""
    block_ids: tuple[int, ...]
    """The owner's blocks under this lease that hold KV, in token order; no other may be read."""
    block_hashes: tuple[str, ...]
    """What each of them holds: content hash in hex, the partial last block included."""
    claim_id: str
    """Known to the one reader that holds the claim, who alone may give it back unread."""


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    reason: str
    """expired (or never held), claimed (by another reader), cancelled, released, revoked."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that is over, and the blocks its owner frees."""

    request_id: str
    block_ids: tuple[int, ...]
    idle: bool
    """Whether the owner has counted them as idle until now: the lease is revocable, and if it was ever claimed,
    `take_claimed` has not told so."""


@dataclass(eq=False, slots=True)
class _Lease:
    request_id: str
    block_ids: tuple[int, ...]
    block_hashes: tuple[str, ...]
    duration: float
    revocable: bool
    expires_at: float
    counted_idle: bool
    queued_for: float = 0.0
    """The time of its entry in the queue that counts; `expires_at` may be later by now."""
    claim_id: str | None = None
    """While claimed."""
    cancelled: bool = False
    ended: bool = False

    @property
    def pinned(self) -> bool:
        return not self.revocable or self.claim_id is not None


class Leases:
    """The leases of one engine, by request id. Thread-safe; nothing takes longer under the lock than a few dictionary
    and heap operations, however many leases there are.

    The counters may be read from any thread.
    """

    def __init__(
        self,
        *,
        claim_seconds: float,
        on_claim: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_claim` is called after each granted claim, on the thread that made it: a read is coming."""
        self._claim_seconds = claim_seconds
        self._on_claim = on_claim
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._idle: OrderedDict[str, _Lease] = OrderedDict()
        """Revocable and not claimed, oldest first."""
        self._newly_claimed: list[_Lease] = []
        """Revocable ones, for `take_claimed`."""
        self._queue: list[tuple[float, int, _Lease]] = []
        """A heap by expiry. Entries may be out of date; `_next` puts them right when their time comes."""
        self._order = itertools.count()
        self._ended: OrderedDict[str, Fate] = OrderedDict()

        self.num_claimed = 0
        """Leases under a claim now."""
        self.num_pinned_blocks = 0
        """Block references now under leases that cannot be revoked; a block shared by two leases counts twice."""
        self.num_granted = 0
        """Leases ever held; each is among the three below once it is over."""
        self.num_ended: Counter[Fate] = Counter()
        """By what ended them: released (read, or given back), expired, revoked."""
        self.num_claims = 0
        self.num_claims_refused: Counter[str] = Counter()
        """By the reason of ClaimRefused."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_held(self) -> int:
        """Leases that cannot be revoked: their reader is on its way, or at work."""
        return len(self._leases) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Leases that can be revoked."""
        return len(self._idle)

    def hold(
        self,
        request_id: str,
        block_ids: Sequence[int],
        block_hashes: Sequence[str],
        duration: float,
        *,
        revocable: bool = False,
    ) -> None:
        """Keep a finished request's blocks for `duration` seconds. Engine thread.

        There may be more blocks than hashes: the last ones hold nothing.
        """
        assert len(block_hashes) <= len(block_ids), f"{request_id}: more hashes than blocks"
        lease = _Lease(
            request_id,
            tuple(block_ids),
            tuple(block_hashes),
            duration,
            revocable,
            expires_at=self._clock() + duration,
            counted_idle=revocable,
        )
        with self._lock:
            assert request_id not in self._leases, f"{request_id} is held twice"
            self._leases[request_id] = lease
            self._ended.pop(request_id, None)
            self.num_granted += 1
            if revocable:
                self._idle[request_id] = lease
            else:
                self.num_pinned_blocks += len(lease.block_ids)
            self._enqueue(lease)

    def claim(self, request_id: str) -> Claim | ClaimRefused:
        """A reader is about to read. One claim per lease: a second reader could still be reading when the first
        one's notification frees the blocks."""
        now = self._clock()
        with self._lock:
            lease = self._leases.get(request_id)
            refusal = self._refusal(request_id, lease, now)
            if lease is None or refusal is not None:
                self.num_claims_refused[refusal or "expired"] += 1
                return ClaimRefused(refusal or "expired")
            if lease.revocable:
                del self._idle[request_id]
                self._newly_claimed.append(lease)
                self.num_pinned_blocks += len(lease.block_ids)
            lease.claim_id = secrets.token_hex(16)
            lease.expires_at = now + self._claim_seconds
            if lease.expires_at < lease.queued_for:
                self._enqueue(lease)
            self.num_claimed += 1
            self.num_claims += 1
            filled = lease.block_ids[: len(lease.block_hashes)]
            claim = Claim(self._claim_seconds, filled, lease.block_hashes, lease.claim_id)
        self._on_claim()
        return claim

    def renew(self, request_ids: Iterable[str]) -> int:
        """Heartbeat of readers that still queue; returns how many of the leases are alive. A revocable lease has its
        time and no more."""
        now, alive = self._clock(), 0
        with self._lock:
            for request_id in request_ids:
                lease = self._leases.get(request_id)
                if lease is None or now >= lease.expires_at:
                    continue
                alive += 1
                if not lease.revocable and lease.claim_id is None:
                    lease.expires_at = max(lease.expires_at, now + lease.duration)
        return alive

    def cancel(self, request_id: str, claim_id: str | None = None) -> bool:
        """Someone says that nobody will read. If so, claims are refused from here on and True is returned: the
        caller then sends the engine a LeaseReleased. A claimed lease is left alone, for its reader may be at work,
        unless it is that reader who gives its claim back (`claim_id`).
        """
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or lease.cancelled or lease.claim_id != claim_id:
                return False
            lease.cancelled = True
            return True

    def release(self, request_id: str) -> Ended | None:
        """End a lease; None if it has ended before. Engine thread."""
        with self._lock:
            lease = self._leases.get(request_id)
            return None if lease is None else self._end(lease, "released")

    def expire(self, now: float) -> list[Ended]:
        """End the leases that ran out by `now`. Engine thread."""
        ended = []
        with self._lock:
            while (lease := self._next()) is not None and now >= lease.expires_at:
                ended.append(self._end(lease, "expired"))
        return ended

    def revoke_oldest(self) -> Ended | None:
        """End the idle lease that was held first; None if there is none. Engine thread."""
        with self._lock:
            lease = next(iter(self._idle.values()), None)
            return None if lease is None else self._end(lease, "revoked")

    def take_claimed(self) -> list[tuple[int, ...]]:
        """The blocks of the leases that are idle no longer, because they were claimed since the last call. Engine
        thread."""
        if not self._newly_claimed:
            return []
        with self._lock:
            claimed, self._newly_claimed = self._newly_claimed, []
            for lease in claimed:
                lease.counted_idle = False
        return [lease.block_ids for lease in claimed if not lease.ended]

    def next_expiry(self) -> float | None:
        """When the next lease runs out, unless renewed (monotonic seconds); None without leases."""
        with self._lock:
            lease = self._next()
        return None if lease is None else lease.expires_at

    def fate(self, request_id: str) -> Fate | None:
        """What ended a lease that is over; None if it is not, or that is long ago. Engine thread."""
        return self._ended.get(request_id)

    # Under the lock.

    def _refusal(self, request_id: str, lease: _Lease | None, now: float) -> str | None:
        if lease is None:
            return self._ended.get(request_id, "expired")
        if now >= lease.expires_at:
            return "expired"
        if lease.cancelled:
            return "cancelled"
        return None if lease.claim_id is None else "claimed"

    def _end(self, lease: _Lease, fate: Fate) -> Ended:
        del self._leases[lease.request_id]
        self._idle.pop(lease.request_id, None)
        lease.ended = True
        if lease.pinned:
            self.num_pinned_blocks -= len(lease.block_ids)
        if lease.claim_id is not None:
            self.num_claimed -= 1
        self.num_ended[fate] += 1
        self._ended[lease.request_id] = fate
        if len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        if len(self._queue) > 2 * len(self._leases) + 64:
            self._queue = [entry for entry in self._queue if not entry[2].ended]
            heapq.heapify(self._queue)
        return Ended(lease.request_id, lease.block_ids, lease.counted_idle)

    def _enqueue(self, lease: _Lease) -> None:
        lease.queued_for = lease.expires_at
        heapq.heappush(self._queue, (lease.expires_at, next(self._order), lease))

    def _next(self) -> _Lease | None:
        """The lease that runs out first, at the head of the queue."""
        while self._queue:
            at, _, lease = self._queue[0]
            if not lease.ended and at == lease.queued_for == lease.expires_at:
                return lease
            heapq.heappop(self._queue)
            if not lease.ended and at == lease.queued_for:  # renewed, or claimed, for longer
                self._enqueue(lease)
        return None

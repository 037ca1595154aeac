"""Leases: finished blocks that another engine may still read, and for how long.

The reader names the lease in three calls: *claim* before it reads, *release* (a notification that comes with the
read) when it has the data, *renew* while its request still queues. The answer to a claim says what the blocks hold,
for the reader to compare. A claimed lease ends by release or `claim_seconds` after the claim arrived; since the reader
counts the same span from before it sent the claim, and throws away what was not complete by then, recycled memory may
be read but is never used.

Blocks return to their pool on the engine's main thread only: it alone calls `hold`, `release` and `expire`. The HTTP
and transfer threads call `claim`, `renew` and `cancel`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


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
    """expired (or never held), claimed (by another reader), cancelled."""


@dataclass(slots=True)
class _Lease:
    block_ids: tuple[int, ...]
    block_hashes: tuple[str, ...]
    duration: float
    expires_at: float
    claim_id: str | None = None
    """While claimed."""
    cancelled: bool = False


class Leases:
    """The leases of one engine, by request id. Thread-safe; nothing under the lock takes longer than a few
    dictionary operations."""

    def __init__(self, *, claim_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._claim_seconds = claim_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        """Block references under lease; a block shared by two leases counts twice."""
        with self._lock:
            return sum(len(lease.block_ids) for lease in self._leases.values())

    def hold(self, request_id: str, block_ids: Sequence[int], block_hashes: Sequence[str], duration: float) -> None:
        """Keep a finished request's blocks for `duration` seconds. Engine thread.

        There may be more blocks than hashes: the last ones hold nothing.
        """
        assert len(block_hashes) <= len(block_ids), f"{request_id}: more hashes than blocks"
        lease = _Lease(tuple(block_ids), tuple(block_hashes), duration, self._clock() + duration)
        with self._lock:
            assert request_id not in self._leases, f"{request_id} is held twice"
            self._leases[request_id] = lease

    def claim(self, request_id: str) -> Claim | ClaimRefused:
        """A reader is about to read. One claim per lease: a second reader could still be reading when the first
        one's notification frees the blocks."""
        now = self._clock()
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or now >= lease.expires_at:
                return ClaimRefused("expired")
            if lease.cancelled:
                return ClaimRefused("cancelled")
            if lease.claim_id is not None:
                return ClaimRefused("claimed")
            lease.claim_id = secrets.token_hex(16)
            lease.expires_at = now + self._claim_seconds
            filled = lease.block_ids[: len(lease.block_hashes)]
            return Claim(self._claim_seconds, filled, lease.block_hashes, lease.claim_id)

    def renew(self, request_ids: Iterable[str]) -> int:
        """Heartbeat of readers that still queue; returns how many of the leases are alive."""
        now, alive = self._clock(), 0
        with self._lock:
            for request_id in request_ids:
                lease = self._leases.get(request_id)
                if lease is None or now >= lease.expires_at:
                    continue
                alive += 1
                if lease.claim_id is None:
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

    def release(self, request_id: str) -> tuple[int, ...] | None:
        """End a lease; its blocks, to be freed by the caller, or None if it has ended before. Engine thread."""
        with self._lock:
            lease = self._leases.pop(request_id, None)
        return lease.block_ids if lease else None

    def expire(self, now: float) -> list[tuple[str, tuple[int, ...]]]:
        """End the leases that ran out by `now`: (request id, blocks to be freed). Engine thread."""
        with self._lock:
            ended = [(key, lease) for key, lease in self._leases.items() if now >= lease.expires_at]
            for key, _ in ended:
                del self._leases[key]
        return [(key, lease.block_ids) for key, lease in ended]

    def next_expiry(self) -> float | None:
        """When the next lease runs out, unless renewed (monotonic seconds); None without leases."""
        with self._lock:
            return min((lease.expires_at for lease in self._leases.values()), default=None)

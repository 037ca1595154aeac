"""FakeTransport: engines in one process exchange KV by copying, on a clock that tests move by hand.

It keeps the protocol of the real transport (claim, read, notify; releases and heartbeats on the side), so that delays,
failures, lost messages, late reads and a peer's death can be placed in every gap between two of its steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from connectors.lease import ClaimRefused, Leases
from connectors.transport import Emit, LeaseReleased, Peer, Pull, PullDone, PullFailed, PullStalled


class Memory(Protocol):
    """The KV arena of one engine, block by block; what a block's content is, is the owner's business."""

    def read(self, block_id: int) -> Any: ...
    def write(self, block_id: int, content: Any) -> None: ...


class ByteMemory:
    """An arena of bytes."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._arena = bytearray(num_blocks * block_bytes)
        self._block_bytes = block_bytes

    def read(self, block_id: int) -> bytes:
        return bytes(self._arena[block_id * self._block_bytes : (block_id + 1) * self._block_bytes])

    def write(self, block_id: int, content: bytes) -> None:
        assert len(content) == self._block_bytes, f"{len(content)} bytes for a block of {self._block_bytes}"
        self._arena[block_id * self._block_bytes : (block_id + 1) * self._block_bytes] = content


class FakeClock:
    """Monotonic seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Fault:
    """How one pull goes. Delays in seconds, each before its step; all zero and no failure by default."""

    before_claim: float = 0.0
    before_read: float = 0.0
    before_done: float = 0.0
    before_notify: float = 0.0
    stalls: float | None = None
    """Report PullStalled after the claim, write to the local blocks as long as that after it, and then fail."""
    fails: str | None = None
    """End in PullFailed with this reason after the read, half of which has been written."""
    notify_lost: bool = False


@dataclass(slots=True)
class _Endpoint:
    engine_id: str
    memory: Memory
    leases: Leases
    emit: Emit
    kv_layout: str


@dataclass(frozen=True, slots=True)
class _Read:
    """A pull whose claim was granted."""

    pull: Pull
    fault: Fault
    owner: _Endpoint
    sent_at: float
    valid_for: float


@dataclass(slots=True)
class FakeNetwork:
    """What connects the engines of a test: who listens where, what is under way, and what goes wrong."""

    clock: FakeClock = field(default_factory=FakeClock)
    faults: Callable[[Pull], Fault] = lambda pull: Fault()
    message_delay: float = 0.0
    """Seconds a release or heartbeat takes."""
    drop_messages: bool = False
    """Lose releases and heartbeats."""
    unreachable: set[str] = field(default_factory=set)
    """Ids of engines that nobody reaches, as if they were dead: claims and reads fail, messages and notifications are
    lost."""
    endpoints: dict[tuple[str, int], _Endpoint] = field(default_factory=dict)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def num_under_way(self) -> int:
        return len(self._due)

    def reach(self, peer: Peer) -> _Endpoint | None:
        """Who answers at this peer's address; its name may be another."""
        endpoint = self.endpoints.get((peer.host, peer.port))
        return None if endpoint is None or endpoint.engine_id in self.unreachable else endpoint

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.clock.now + seconds, next(self._order), action))

    def advance(self, seconds: float = 0.0) -> None:
        """Let time pass and everything happen that is due in it, in order."""
        end = self.clock.now + seconds
        while self._due and self._due[0][0] <= end:
            at, _, action = heapq.heappop(self._due)
            self.clock.now = max(self.clock.now, at)
            action()
        self.clock.now = end


class FakeTransport:
    """One engine's end of a FakeNetwork. `emit` is called from `FakeNetwork.advance`."""

    def __init__(
        self, network: FakeNetwork, peer: Peer, *, memory: Memory, leases: Leases, emit: Emit, kv_layout: str
    ) -> None:
        self._network = network
        self._peer = peer
        self._memory = memory
        self._emit = emit
        self._kv_layout = kv_layout
        self.num_handshakes_failed: Counter[str] = Counter()
        self.num_messages_dropped = 0
        self.failed = False
        self.pulls: list[Pull] = []
        self.releases: list[tuple[Peer, str]] = []
        self.renewals: list[tuple[Peer, tuple[str, ...]]] = []
        network.endpoints[peer.host, peer.port] = _Endpoint(peer.engine_id, memory, leases, emit, kv_layout)

    def pull(self, pull: Pull) -> None:
        self.pulls.append(pull)
        fault = self._network.faults(pull)
        self._network.after(fault.before_claim, lambda: self._claim(pull, fault))

    def release(self, peer: Peer, remote_request_id: str) -> None:
        self.releases.append((peer, remote_request_id))
        self._cancel(peer, remote_request_id)

    def renew(self, peer: Peer, remote_request_ids: Sequence[str]) -> None:
        self.renewals.append((peer, tuple(remote_request_ids)))

        def arrive() -> None:
            owner = self._owner(peer)
            if owner is not None:
                owner.leases.renew(remote_request_ids)

        self._send(arrive)

    def agent_info(self) -> dict[str, Any]:
        return {"version": 1, "engine_id": self._peer.engine_id, "kv_layout": self._kv_layout}

    def close(self) -> None:
        """Leave the network: peers get no answer from here on."""
        self._network.endpoints.pop((self._peer.host, self._peer.port), None)

    def _cancel(self, peer: Peer, remote_request_id: str, claim_id: str | None = None) -> None:
        def arrive() -> None:
            owner = self._owner(peer)
            if owner is not None and owner.leases.cancel(remote_request_id, claim_id):
                owner.emit(LeaseReleased(remote_request_id))

        self._send(arrive)

    def _send(self, arrive: Callable[[], None]) -> None:
        if not self._network.drop_messages:
            self._network.after(self._network.message_delay, arrive)

    def _owner(self, peer: Peer) -> _Endpoint | None:
        owner = self._network.reach(peer)
        return owner if owner is not None and owner.engine_id == peer.engine_id else None

    def _fail(self, pull: Pull, reason: str) -> None:
        self._emit(PullFailed(pull.request_id, reason, f"scripted or found: {reason}"))

    def _handshake_fails(self, pull: Pull, reason: str) -> None:
        self.num_handshakes_failed[reason] += 1
        self._fail(pull, reason)

    def _claim(self, pull: Pull, fault: Fault) -> None:
        owner = self._network.reach(pull.peer)
        if owner is None:
            self._handshake_fails(pull, "handshake")
        elif owner.engine_id != pull.peer.engine_id:
            self._handshake_fails(pull, "engine_id")
        elif owner.kv_layout != (pull.kv_layout or self._kv_layout):
            self._handshake_fails(pull, "layout")
        else:
            claim = owner.leases.claim(pull.remote_request_id)
            if isinstance(claim, ClaimRefused):
                self._fail(pull, "claim")
                return
            if not pull.is_covered_by(claim.block_ids, claim.block_hashes):
                self._cancel(pull.peer, pull.remote_request_id, claim.claim_id)
                self._fail(pull, "hashes")
                return
            read = _Read(pull, fault, owner, sent_at=self._network.clock.now, valid_for=claim.valid_for)
            if fault.stalls is not None:
                self._emit(PullStalled(pull.request_id, "scripted: stalled"))
                self._network.after(fault.stalls, lambda: self._end_stall(read))
                return
            self._network.after(fault.before_read, lambda: self._copy(read))

    def _end_stall(self, read: _Read) -> None:
        for local, remote in zip(read.pull.local_block_ids, read.pull.remote_block_ids, strict=True):
            self._memory.write(local, read.owner.memory.read(remote))
        self._fail(read.pull, "timeout")

    def _copy(self, read: _Read) -> None:
        pull, owner = read.pull, read.owner
        if self._owner(pull.peer) is not owner:
            self._fail(pull, "disconnected")
            return
        # Whatever becomes of the pull, the local blocks are written to now, with what is there now.
        pairs = list(zip(pull.local_block_ids, pull.remote_block_ids, strict=True))
        for local, remote in pairs[: len(pairs) // 2] if read.fault.fails else pairs:
            self._memory.write(local, owner.memory.read(remote))
        self._network.after(read.fault.before_done, lambda: self._done(read))

    def _done(self, read: _Read) -> None:
        pull, owner = read.pull, read.owner
        seconds = self._network.clock.now - read.sent_at
        if read.fault.fails:
            self._fail(pull, read.fault.fails)
            return
        if not read.fault.notify_lost and self._owner(pull.peer) is owner:
            notice = LeaseReleased(pull.remote_request_id)
            self._network.after(read.fault.before_notify, lambda: owner.emit(notice))
        if seconds >= read.valid_for:
            self._fail(pull, "expired")
            return
        num_bytes = sum(len(self._memory.read(block_id)) for block_id in pull.local_block_ids)
        self._emit(PullDone(pull.request_id, num_bytes, seconds))

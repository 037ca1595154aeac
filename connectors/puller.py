"""Pulls from other engines: handshake, claim, read, and what goes wrong on the way.

    pull ── handshake (once per peer) ── claim ── read + notification ── PullDone
                 │                         │         │
                 └── PullFailed ───────────┘         ├── peer lost ─────── PullFailed
                                                     └── deadline ── PullStalled ·· (peer moves on) ·· PullFailed

A read that was posted cannot be taken back: releasing its handle or dropping the peer leaves it under way, and when a
peer that hung goes on, its answer is still written into local memory. So a read is given up by nobody but itself: it
ends when NIXL says that it did, or that the peer is lost.

All of this runs on the transfer thread, which calls `poll` often; the HTTP exchanges have threads of their own and come
back through `post`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from connectors.agent import Agent, AgentError, PeerLost, Read, Remote
from connectors.lane import Lane
from connectors.peer import AgentInfo, Claim, PeerClient, PeerError, Refused, Service
from connectors.transport import Emit, Peer, Pull, PullDone, PullFailed, PullStalled

logger = logging.getLogger(__name__)

FIRST_BACK_OFF = 1.0
LAST_BACK_OFF = 60.0
EXCHANGE_SLACK = 1.0
"""Seconds an HTTP exchange may be late, for what has no deadline of its own (name resolution)."""
PEER_IDLE_SECONDS = 600.0
"""A peer not used for this long is forgotten."""
MAX_PEERS = 64
"""Peers at a time, and so threads and connections: transfer params may name any number of invented ones."""
STOPPING = "this engine stops"
NOTIFICATION_PREFIX = b"done:"
"""Of the notification that comes with a read; the owner's request id follows."""


@dataclass(eq=False, slots=True)
class _Link:
    """The memory of a peer, for as long as it is the same one, and the reads from it."""

    remote: Remote
    info: AgentInfo
    num_reads: int = 0


@dataclass(eq=False, slots=True)
class _Peer:
    peer: Peer
    lane: Lane
    last_used: float
    link: _Link | None = None
    num_handshakes: int = 0
    handshake_deadline: float | None = None
    """While a handshake is under way."""
    waiting: list[_Job] = field(default_factory=list)
    """Pulls that need the handshake."""
    num_failures: int = 0
    retry_at: float = 0.0
    failure: tuple[str, str] = ("", "")
    """Reason and detail for pulls until `retry_at`."""


class _Phase(Enum):
    HANDSHAKE = "handshake"
    CLAIM = "claim"
    READ = "read"
    STALLED = "stalled"
    OVER = "over"


@dataclass(eq=False, slots=True)
class _Job:
    pull: Pull
    peer: _Peer
    started_at: float
    phase: _Phase = _Phase.HANDSHAKE
    deadline: float = float("inf")
    claim: Claim | None = None
    link: _Link | None = None
    read: Read | None = None
    failure: tuple[str, str] = ("", "")
    """Of a stalled pull."""
    lost_track: bool = False
    """NIXL cannot tell any more whether the read is over."""


class Puller:
    """Owns the peers and the pulls of one engine. Transfer thread only."""

    def __init__(
        self,
        agent: Agent,
        *,
        me: AgentInfo,
        emit: Emit,
        post: Callable[[Callable[[], None]], None],
        transfer_timeout: float,
        handshake_timeout: float,
        service: Service = "kv",
    ) -> None:
        self._agent = agent
        self._service = service
        self._me = me
        self._emit = emit
        self._post = post
        self._transfer_timeout = transfer_timeout
        self._handshake_timeout = handshake_timeout
        self._peers: dict[Peer, _Peer] = {}
        self._jobs: set[_Job] = set()
        self._retired: list[_Link] = []
        """Links given up, to be disconnected when their last read is over."""
        self._closed = False
        self.num_handshakes_failed: Counter[str] = Counter()
        """By reason: handshake, engine_id, layout."""
        self.num_messages_dropped = 0
        """Releases and heartbeats not sent because too many other peers are busy."""

    @property
    def num_pulls(self) -> int:
        return len(self._jobs)

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    @property
    def reading(self) -> bool:
        """Whether a read is under way that is expected to end soon."""
        return any(job.phase is _Phase.READ for job in self._jobs)

    def pull(self, pull: Pull) -> None:
        now = time.monotonic()
        if self._closed:
            self._emit(PullFailed(pull.request_id, "transfer", STOPPING))
            return
        peer = self._peer(pull.peer, now)
        if peer is None:
            self._emit(PullFailed(pull.request_id, "handshake", f"{MAX_PEERS} other peers are busy"))
            return
        job = _Job(pull, peer, now)
        self._jobs.add(job)
        if peer.link is not None and now >= peer.retry_at:
            self._claim(job)
        elif peer.handshake_deadline is not None:
            self._await_handshake(job)
        elif now < peer.retry_at:
            reason, detail = peer.failure
            self._fail(job, reason, f"{detail}; next try in {peer.retry_at - now:.0f} s")
        else:
            self._handshake(peer, now)
            self._await_handshake(job)

    def release(self, peer: Peer, remote_request_id: str) -> None:
        self._tell(
            "release", peer, lambda client, deadline: client.release(peer.engine_id, remote_request_id, deadline)
        )

    def renew(self, peer: Peer, remote_request_ids: Sequence[str]) -> None:
        self._tell("renew", peer, lambda client, deadline: client.renew(peer.engine_id, remote_request_ids, deadline))

    def poll(self) -> None:
        """Find out what has ended, and end what is late."""
        now = time.monotonic()
        for job in list(self._jobs):
            if job.phase in (_Phase.READ, _Phase.STALLED):
                self._poll_read(job, now)
            elif job.phase is _Phase.CLAIM and now > job.deadline:
                self._peer_failed(job.peer, "claim", "the claim was not answered in time", now)
                self._fail(job, "claim", "the claim was not answered in time")
        for peer in list(self._peers.values()):
            if peer.handshake_deadline is not None and now > peer.handshake_deadline:
                self._handshake_failed(peer, "handshake", "the handshake was not answered in time")
        for link in [link for link in self._retired if not link.num_reads]:
            self._retired.remove(link)
            link.remote.disconnect()

    def forget_idle(self) -> None:
        """Drop peers that were not used for long."""
        now = time.monotonic()
        busy = {job.peer.peer for job in self._jobs}
        for key, peer in list(self._peers.items()):
            if key not in busy and now - peer.last_used > PEER_IDLE_SECONDS:
                self._forget(key)

    def close(self) -> list[Lane]:
        """Take no more jobs, and end every pull whose read is not posted. The lanes may still have messages to send."""
        self._closed = True
        for job in list(self._jobs):
            if job.phase in (_Phase.HANDSHAKE, _Phase.CLAIM):
                self._fail(job, "transfer", STOPPING)
        for peer in self._peers.values():
            peer.lane.close()
        return [peer.lane for peer in self._peers.values()]

    def fail_all(self) -> None:
        """Report the pulls left as failed: the agent is gone, and no read can write any more."""
        for job in list(self._jobs):
            reason, detail = job.failure
            self._fail(job, reason or "transfer", detail or STOPPING)

    def _tell(self, what: str, key: Peer, exchange: Callable[[PeerClient, float], object]) -> None:
        """Send a message whose loss costs the peer no more than a lease's time."""
        if self._closed:
            return
        peer = self._peer(key, time.monotonic())
        if peer is None:
            self.num_messages_dropped += 1
            return

        def answered(result: object) -> None:
            if isinstance(result, PeerError):
                logger.debug("%s failed peer=%s:%d detail=%s", what, key.host, key.port, result)

        peer.lane.call(exchange, self._handshake_timeout, answered)

    # Handshake.

    def _peer(self, key: Peer, now: float) -> _Peer | None:
        """The peer of this name; None if it is a new one and there is no room for it."""
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= MAX_PEERS and not self._make_room():
                return None
            peer = self._peers[key] = _Peer(key, Lane(key.host, key.port, self._service), now)
        peer.last_used = now
        return peer

    def _make_room(self) -> bool:
        """Forget the peer that has been idle for longest, rather one that never answered for itself."""
        busy = {job.peer.peer for job in self._jobs}
        idle = [peer for key, peer in self._peers.items() if key not in busy and peer.lane.idle]
        if not idle:
            return False
        self._forget(min(idle, key=lambda peer: (peer.link is not None, peer.last_used)).peer)
        return True

    def _await_handshake(self, job: _Job) -> None:
        job.phase = _Phase.HANDSHAKE
        job.peer.waiting.append(job)

    def _handshake(self, peer: _Peer, now: float) -> None:
        peer.num_handshakes += 1
        peer.handshake_deadline = now + self._handshake_timeout + EXCHANGE_SLACK
        number = peer.num_handshakes

        def answered(result: AgentInfo | PeerError) -> None:
            self._post(lambda: self._handshaked(peer, number, result))

        peer.lane.call(lambda client, deadline: client.agent(deadline), self._handshake_timeout, answered)

    def _handshaked(self, peer: _Peer, number: int, result: AgentInfo | PeerError) -> None:
        if number != peer.num_handshakes or peer.handshake_deadline is None:
            return  # given up meanwhile
        if isinstance(result, PeerError):
            self._handshake_failed(peer, "handshake", str(result))
            return
        if obstacle := self._obstacle(peer.peer, result):
            self._handshake_failed(peer, *obstacle)
            return
        if peer.link is not None and peer.link.info != result:
            self._unlink(peer)
        if peer.link is None:
            try:
                peer.link = _Link(self._agent.connect(result), result)
            except AgentError as error:
                self._handshake_failed(peer, "handshake", str(error))
                return
            self._replace_predecessors(peer.peer)
        peer.handshake_deadline = None
        waiting, peer.waiting = peer.waiting, []
        for job in waiting:
            self._claim(job)

    def _obstacle(self, peer: Peer, info: AgentInfo) -> tuple[str, str] | None:
        """Why this peer cannot be read from, if so: (reason, detail)."""
        if info.engine_id != peer.engine_id:
            return "engine_id", f"engine {info.engine_id} answers for {peer.engine_id}: restarted, or a wrong address"
        if info.engine_id == self._me.engine_id or info.agent_name == self._me.agent_name:
            return "engine_id", "this engine itself"
        if info.kv_layout != self._me.kv_layout:
            return "layout", "the peer's KV is of another model or layout"
        if info.block_bytes != self._me.block_bytes:
            return "layout", f"the peer's blocks have {info.block_bytes} bytes, ours {self._me.block_bytes}"
        return None

    def _handshake_failed(self, peer: _Peer, reason: str, detail: str) -> None:
        peer.handshake_deadline = None
        self.num_handshakes_failed[reason] += 1
        self._peer_failed(peer, reason, detail, time.monotonic())
        waiting, peer.waiting = peer.waiting, []
        for job in waiting:
            self._fail(job, reason, detail)

    def _replace_predecessors(self, successor: Peer) -> None:
        """Forget the engines that were at this address before: it has been restarted."""
        for key in [key for key in self._peers if key != successor]:
            if (key.host, key.port) == (successor.host, successor.port):
                self._unlink(self._peers[key])
                if not any(job.peer.peer == key for job in self._jobs):
                    self._forget(key)

    # Claim.

    def _claim(self, job: _Job) -> None:
        pull, link = job.pull, job.peer.link
        assert link is not None, "claim before the handshake"
        if pull.kv_layout not in (None, link.info.kv_layout):
            self._fail(job, "layout", "the blocks on offer are of another model or layout")
            return
        job.phase, job.link = _Phase.CLAIM, link
        job.deadline = time.monotonic() + self._handshake_timeout + EXCHANGE_SLACK
        engine_id, request_id, me = pull.peer.engine_id, pull.remote_request_id, self._me.engine_id

        def claim(client: PeerClient, deadline: float) -> Claim:
            claim = client.claim(engine_id, request_id, me, deadline)
            if self._closed:
                # The transfer thread has closed the lane and cannot give the claim back any more.
                client.release(engine_id, request_id, deadline, claim.claim_id)
            return claim

        job.peer.lane.call(
            claim, self._handshake_timeout, lambda result: self._post(lambda: self._claimed(job, result))
        )

    def _claimed(self, job: _Job, result: Claim | PeerError) -> None:
        now = time.monotonic()
        if job.phase is not _Phase.CLAIM:
            if isinstance(result, Claim):
                self._unclaim(job, result)
        elif isinstance(result, Refused):
            mismatch = result.code == "engine_mismatch"
            if mismatch:
                self._unlink(job.peer)
                self._peer_failed(job.peer, "engine_id", str(result), now)
            self._fail(job, "engine_id" if mismatch else "claim", str(result))
        elif isinstance(result, PeerError):
            self._peer_failed(job.peer, "claim", str(result), now)
            self._fail(job, "claim", str(result))
        elif obstacle := self._unreadable(job, result, now):
            self._unclaim(job, result)
            self._fail(job, *obstacle)
        else:
            job.claim = result
            self._read(job)

    def _unreadable(self, job: _Job, claim: Claim, now: float) -> tuple[str, str] | None:
        """Why a granted claim is not used, if so: (reason, detail)."""
        assert job.link is not None, "claim without a link"
        if job.peer.link is not job.link:
            return "disconnected", "the connection to the peer was lost"
        if not job.pull.is_covered_by(claim.block_ids, claim.block_hashes):
            return "hashes", "the owner does not hold this prompt's blocks under this request"
        if max(job.pull.remote_block_ids) >= job.link.info.num_blocks:
            return "claim", "block ids beyond the peer's memory"
        if now >= claim.valid_until:
            return "expired", "the claim ran out before the read began"
        return None

    def _unclaim(self, job: _Job, claim: Claim) -> None:
        """Tell the owner that a granted claim will not be used."""
        engine_id, request_id = job.pull.peer.engine_id, job.pull.remote_request_id
        self._tell(
            "unclaim",
            job.pull.peer,
            lambda client, deadline: client.release(engine_id, request_id, deadline, claim.claim_id),
        )

    # Read.

    def _read(self, job: _Job) -> None:
        assert job.claim is not None, "read without a claim"
        assert job.link is not None, "read without a link"
        pull = job.pull
        job.deadline = min(job.claim.sent_at + self._transfer_timeout, job.claim.valid_until)
        try:
            job.read = job.link.remote.read(pull.local_block_ids, pull.remote_block_ids, _notification(pull))
        except PeerLost as error:
            self._lost(job, error)
        except AgentError as error:
            self._unclaim(job, job.claim)
            self._peer_failed(job.peer, "transfer", str(error), time.monotonic())
            self._fail(job, "transfer", str(error))
        else:
            job.phase = _Phase.READ
            job.link.num_reads += 1
            self._poll_read(job, time.monotonic())

    def _poll_read(self, job: _Job, now: float) -> None:
        assert job.read is not None, "poll without a read"
        done = False
        if not job.lost_track:
            try:
                done = job.read.done()
            except PeerLost as error:
                self._end_read(job)
                self._lost(job, error)
                return
            except AgentError as error:
                logger.error("read lost track of request_id=%s detail=%s", job.pull.request_id, error)
                job.lost_track = True
                self._stall(job, "transfer", str(error), now)
        if done:
            self._end_read(job)
            self._done(job, time.monotonic())
        elif job.phase is _Phase.READ and now >= job.deadline:
            self._stall(job, "timeout", f"no answer within {now - job.started_at:.1f} s", now)

    def _end_read(self, job: _Job) -> None:
        assert job.read is not None, "no read to end"
        assert job.link is not None, "no link to end"
        job.read.release()
        job.read = None
        job.link.num_reads -= 1

    def _done(self, job: _Job, now: float) -> None:
        assert job.claim is not None, "read without a claim"
        if job.phase is _Phase.STALLED:
            self._fail(job, *job.failure)
        elif now >= job.claim.valid_until:
            self._fail(job, "expired", "the claim ran out while the blocks were read")
        else:
            job.peer.num_failures = 0
            num_bytes = len(job.pull.local_block_ids) * self._me.block_bytes
            self._end(job)
            self._emit(PullDone(job.pull.request_id, num_bytes, now - job.started_at))

    def _stall(self, job: _Job, reason: str, detail: str, now: float) -> None:
        self._peer_failed(job.peer, reason, detail, now)
        if job.phase is _Phase.READ:
            job.phase, job.failure = _Phase.STALLED, (reason, detail)
            self._emit(PullStalled(job.pull.request_id, detail))

    def _lost(self, job: _Job, error: PeerLost) -> None:
        assert job.claim is not None, "read without a claim"
        self._unclaim(job, job.claim)  # the owner may live, though the connection does not
        if job.peer.link is job.link:
            self._unlink(job.peer)
            self._peer_failed(job.peer, "disconnected", str(error), time.monotonic())
        self._fail(job, *(job.failure if job.phase is _Phase.STALLED else ("disconnected", str(error))))

    # How pulls and peers end.

    def _fail(self, job: _Job, reason: str, detail: str) -> None:
        self._end(job)
        self._emit(PullFailed(job.pull.request_id, reason, detail))

    def _end(self, job: _Job) -> None:
        job.phase = _Phase.OVER
        self._jobs.discard(job)

    def _peer_failed(self, peer: _Peer, reason: str, detail: str, now: float) -> None:
        """Leave the peer alone for a while, longer each time; a restarted engine is another peer."""
        if now < peer.retry_at:
            return  # one failure, noticed by several pulls
        wait = min(FIRST_BACK_OFF * 2**peer.num_failures, LAST_BACK_OFF)
        peer.num_failures = min(peer.num_failures + 1, 16)
        peer.retry_at, peer.failure = now + wait, (reason, detail)
        logger.warning(
            "peer failed peer=%s:%d engine_id=%s reason=%s retry_seconds=%.0f detail=%s",
            peer.peer.host, peer.peer.port, peer.peer.engine_id, reason, wait, detail,
        )  # fmt: skip

    def _unlink(self, peer: _Peer) -> None:
        if peer.link is not None:
            self._retired.append(peer.link)
            peer.link = None

    def _forget(self, key: Peer) -> None:
        peer = self._peers.pop(key)
        peer.lane.close()
        self._unlink(peer)


def _notification(pull: Pull) -> bytes:
    return NOTIFICATION_PREFIX + pull.remote_request_id.encode()

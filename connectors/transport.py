"""What moves KV between engines, seen from the scheduler: jobs go in, events come out.

`connectors/nixl.py` is the real one, `connectors/fake.py` copies within a process for tests. Jobs are plain
values; a transport works in its own thread and reports through the `emit` callback it was built with, which must
be safe to call from any thread (the engine passes the put of its inbox).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine's worker; host and port are those of its HTTP server."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Read remote blocks into local ones, then tell the owner that it may free them.

    The transport claims the owner's lease first. It reads only what the lease `covers`, and discards what it read when
    the claim ran out meanwhile, so that neither another prompt's KV nor recycled memory is ever reported as done.
    """

    request_id: str
    """The reader's request; names the job in events."""
    peer: Peer
    remote_request_id: str
    """The owner's name for the blocks' lease, as found in the transfer params."""
    local_block_ids: tuple[int, ...]
    remote_block_ids: tuple[int, ...]
    """Same length as local_block_ids, pairwise."""
    first_block: int
    """Where the first of them lies in the prompt, in blocks."""
    block_hashes: tuple[str, ...]
    """What they must hold: the hashes (hex) that the reader computed from its own prompt, same length."""
    kv_layout: str | None
    """The layout fingerprint the owner must have; None accepts what the handshake says if it equals ours."""

    def is_covered_by(self, block_ids: Sequence[int], block_hashes: Sequence[str]) -> bool:
        """Whether the owner's lease, given in token order, has these blocks in these places with these hashes.

        The transfer params come with the request and may be anyone's invention: only the owner knows what its blocks
        hold, and only the reader what its prompt is.
        """
        span = slice(self.first_block, self.first_block + len(self.remote_block_ids))
        return tuple(block_ids[span]) == self.remote_block_ids and tuple(block_hashes[span]) == self.block_hashes


@dataclass(frozen=True, slots=True)
class PullDone:
    request_id: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PullStalled:
    """The pull missed its deadline and its read cannot be stopped. The request should not wait any longer, but the
    local blocks may still be written to: they must not be reused before the PullFailed that follows, once the peer
    has moved on or is gone (which may take as long as the peer hangs)."""

    request_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class PullFailed:
    """Nothing of the pull may be used. The local blocks can no longer be written to: they may be reused."""

    request_id: str
    reason: str
    """For metrics, one of: handshake, engine_id, layout, claim, hashes, disconnected, timeout, expired, transfer."""
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """A reader is done with (or does not need) the blocks leased under this request id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LeasesRenewed:
    """A reader still waits for these requests' blocks."""

    request_ids: tuple[str, ...]


TransferEvent = PullDone | PullStalled | PullFailed | LeaseReleased | LeasesRenewed
Emit = Callable[[TransferEvent], None]


class Transport(Protocol):
    """Never blocks the caller; every pull ends in exactly one PullDone or PullFailed."""

    @property
    def num_handshakes_failed(self) -> Counter[str]:
        """By reason: handshake, engine_id, layout."""

    @property
    def num_messages_dropped(self) -> int:
        """Releases and heartbeats that were not even sent."""

    def pull(self, pull: Pull) -> None:
        """Start a pull; ends in PullDone or PullFailed, or meets its deadline with PullStalled before that."""

    def release(self, peer: Peer, remote_request_id: str) -> None:
        """Tell the owner that nobody will read these blocks. Best effort: the lease ends by itself otherwise."""

    def renew(self, peer: Peer, remote_request_ids: Sequence[str]) -> None:
        """Heartbeat: these leases are still wanted. Best effort."""

    @property
    def failed(self) -> bool:
        """Whether it broke down, so that every pull fails and no reader's notification is heard."""

    def agent_info(self) -> dict[str, Any]:
        """What `GET /kv/agent` answers: identity, layout fingerprint and how to reach this engine's memory."""

    def close(self) -> None:
        """Stop, releasing every handle; returns when no transfer can touch local memory any more."""

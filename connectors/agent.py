"""What pulls need of NIXL: read a peer's memory, and know when a read is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from connectors.peer import AgentInfo


class AgentError(Exception):
    """NIXL refused, or failed at, something."""


class PeerLost(AgentError):
    """The connection to the peer broke: nothing is read from it any more."""


class Read(Protocol):
    """A posted read."""

    def done(self) -> bool:
        """False while under way. Raises PeerLost if it can no longer write to memory, AgentError if who knows."""

    def release(self) -> None:
        """Forget a read that is done or lost."""


class Remote(Protocol):
    """A peer's memory."""

    def read(self, local_ids: Sequence[int], remote_ids: Sequence[int], notification: bytes) -> Read:
        """Post a read. Raises PeerLost or AgentError, after which nothing is under way."""

    def disconnect(self) -> None:
        """Forget the peer. None of its reads may be under way."""


class Agent(Protocol):
    def connect(self, info: AgentInfo) -> Remote:
        """Get ready to read a peer's memory. Raises AgentError."""

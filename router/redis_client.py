"""What the store needs of Redis, however Redis is deployed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final, Protocol

from router.redis_address import RedisAddress
from router.redis_cluster import Cluster
from router.redis_connection import connect
from router.redis_link import LATE_SECONDS, Command, Late, Link
from router.redis_sentinel import Sentinels

SENTINEL_STEPS: Final = 3
"""Servers that may be silent in the time there is to connect."""


class RedisClient(Protocol):
    """Commands under way, each with a reply or an exception within the time it has, whatever happens to Redis."""

    @property
    def num_pending(self) -> int:
        """Commands without a reply, those included that nobody waits for any more."""
        ...

    @property
    def is_full(self) -> bool:
        """No more should be sent for now."""
        ...

    def send(self, *command: str | bytes | int, late: Late | None = None) -> Command:
        """PING, or EVAL or EVALSHA with one key. `late` gets a reply, or an exception, that comes when the future is
        done, and whether it was cancelled."""
        ...

    async def close(self) -> None:
        """Wait for what is under way, for the time it may take at most, then hang up."""
        ...


def open_redis(url: str, password_file: Path | None = None, *, timeout: float) -> RedisClient:
    """Connects when there is something to send. Raises ValueError for a URL that is none."""
    address = RedisAddress.parse(url, password_file)
    match address.kind:
        case "cluster":
            return Cluster(address, timeout=timeout)
        case "sentinel":
            sentinels = Sentinels(address, step_seconds=(timeout + LATE_SECONDS) / SENTINEL_STEPS)
            return Link(sentinels.connect, timeout=timeout)
        case "single":
            return Link(partial(connect, address.data, address.endpoints[0]), timeout=timeout)

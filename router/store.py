"""Conversation records in Redis or Valkey: a cache, and treated as one.

No fault of it reaches a client: an error, a timeout or a value nobody can read is a miss, counted. Claiming a record
removes it in the same command, so that two turns never use the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from router.conversation import Record
from router.metrics import Metrics

MAX_CONNECTIONS: Final = 64
FAULTS_UNTIL_PAUSE: Final = 3
PAUSE_SECONDS: Final = 1.0

log = logging.getLogger("router.store")


class Store:
    """Claims and saves records, each within `timeout` seconds.

    After a few faults in a row Redis is left alone for a second, so that turns do not all wait for a dead one.
    """

    def __init__(self, url: str, *, timeout: float, metrics: Metrics) -> None:
        self._timeout = timeout
        self._metrics = metrics
        self._faults = 0
        self._paused_until = 0.0
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._redis = Redis(connection_pool=self._pool)

    async def claim(self, key: str | None) -> Record | None:
        """Take the record out of the store; None if there is none, or none to be had."""
        if key is None:
            return None
        data, ok = await self._run("claim", lambda: self._redis.getdel(key))
        if not ok:
            return None
        record, result = _read(data)
        self._metrics.store_operations.labels("claim", result).inc()
        return record

    async def save(self, key: str, record: Record, *, unless_newer: bool = False) -> bool:
        """Put the record into the store until its deadline; the newest stays. True if Redis has it now."""
        remaining_ms = int(1000 * (record.deadline - time.time()))
        if remaining_ms <= 0:
            return False
        try:
            data = record.pack()
        except TypeError:  # an engine's params hold what cannot be written again
            return False
        _, ok = await self._run("save", lambda: self._redis.set(key, data, px=remaining_ms, nx=unless_newer))
        if ok:
            self._metrics.store_operations.labels("save", "ok").inc()
        return ok

    async def ping(self) -> bool:
        _, ok = await self._run("ping", self._redis.ping)
        return ok

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._redis.aclose()
                await self._pool.disconnect()

    async def _run(self, op: str, command: Callable[[], Awaitable[Any]]) -> tuple[Any, bool]:
        """The command's result and True, or None and False; the fault is counted."""
        if time.monotonic() < self._paused_until:
            self._metrics.store_operations.labels(op, "skipped").inc()
            return None, False
        try:
            async with asyncio.timeout(self._timeout):
                result = await command()
        except (TimeoutError, RedisError, OSError, ValueError, RecursionError) as error:
            slow = isinstance(error, TimeoutError) or "imeout" in type(error).__name__
            self._fault(op, "timeout" if slow else "error", error)
            return None, False
        if self._faults:
            log.info("Redis answers again")
        self._faults = 0
        return result, True

    def _fault(self, op: str, kind: str, error: Exception) -> None:
        self._metrics.store_operations.labels(op, kind).inc()
        self._faults += 1
        if self._faults >= FAULTS_UNTIL_PAUSE:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
        if self._faults == 1:
            log.warning(
                "Redis does not answer: turns go on, but conversations are not remembered. Check --redis.",
                extra={"why": type(error).__name__},
            )


def _read(data: object) -> tuple[Record | None, str]:
    if data is None:
        return None, "miss"
    try:
        record = Record.unpack(data if isinstance(data, bytes) else b"")
    except ValueError:
        return None, "unreadable"
    return (record, "hit") if record.deadline > time.time() else (None, "miss")

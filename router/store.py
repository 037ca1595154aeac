"""Conversation records in Redis or Valkey: a cache, and treated as one.

No fault of it reaches a client: an error, a timeout or a value nobody can read is a miss, counted. A record may be read
by any number of turns; the decode engine's offer beside it is taken by one of them only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from connectors.wire.transfer import KVTransferParams
from router.connections import Connections
from router.metrics import Metrics
from router.record import Record, pack_offer, unpack_offer
from router.scripts import CLAIM, DROP, PUT_BACK, SAVE, TAKE_OFFER, Script

MAX_CONNECTIONS: Final = 64
MAX_PENDING: Final = 1024
"""Commands at a time, those included that nobody waits for any more."""
FAULTS_UNTIL_PAUSE: Final = 3
PAUSE_SECONDS: Final = 1.0
LATE_SECONDS: Final = 1.0
"""How long after its timeout the reply to a command is still read, to undo what it did."""
MAX_TTL_MS: Final = 2**40
STAMP_BYTES: Final = 16

T = TypeVar("T")

log = logging.getLogger("router.store")


@dataclass(frozen=True, slots=True)
class Claimed:
    """A record as found, and the offer if this turn is the one that took it."""

    key: str
    record: Record
    offer: KVTransferParams | None
    stamp: bytes
    """Of the one save that wrote the record."""


@dataclass(frozen=True, slots=True)
class Saved:
    kept: bool
    """Redis has the record now."""
    orphans: tuple[KVTransferParams, ...]
    """Offers nobody will use any more: the replaced record's unclaimed one, or the given one if it was not kept."""
    stamp: bytes = b""
    """Of this save; empty if it was not kept."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    reply: Any = None
    error: Exception | None = None


class Store:
    """Claims and saves records, each in one exchange of at most `timeout` seconds.

    A command whose caller was cancelled or has given up is not broken off: its reply is awaited a little longer, and
    what it did is undone, so that no offer is lost in it. After a few faults in a row Redis is left alone for a second,
    so that turns do not all wait for a dead one.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 0.05,
        metrics: Metrics,
        max_record_bytes: int = 4 << 20,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._timeout = timeout
        self._metrics = metrics
        self._max_record_bytes = max_record_bytes
        self._connections = Connections(url, limit=max_connections, patience=timeout)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._faults = 0
        self._paused_until = 0.0
        self._refused: set[str] = set()

    async def claim(self, key: str | None) -> Claimed | None:
        """The conversation's record, with its offer for the first who asks; None if there is none to be had."""
        if key is None:
            return None

        async def give_back(reply: Any) -> None:
            match reply:
                case [_, bytes() as offered, bytes() as stamp, _]:
                    await self._send(PUT_BACK, key, stamp, offered)

        outcome = await self._run("claim", lambda: self._send(CLAIM, key), give_back, takes=True)
        if outcome is None:
            return None
        claimed, result = _read(key, outcome.reply)
        self._count("claim", result)
        if claimed is None and result == "unreadable":
            self._start(self._attempt(lambda: self._send(DROP, key, _stamp(outcome.reply))))
        return claimed

    async def save(self, key: str, record: Record, offer: KVTransferParams | None) -> Saved:
        """Put the record into the store until its deadline; a record of a higher turn stays."""
        given = () if offer is None else (offer,)
        remaining_ms = int(1000 * (record.deadline - time.time()))
        if remaining_ms <= 0:
            self._count("save", "late")
            return Saved(False, given)
        data, offered = record.pack(), _packed(offer)
        fits = len(data) + len(offered) <= self._max_record_bytes
        if not fits:
            data, offered = replace(record, token_ids=array("I"), media=()).pack(), b""
        stamp = secrets.token_bytes(STAMP_BYTES)
        ttl_ms = min(remaining_ms, MAX_TTL_MS)
        outcome = await self._run(
            "save",
            lambda: self._send(SAVE, key, record.turn, stamp, ttl_ms, data, offered),
            lambda _: self._send(TAKE_OFFER, key, stamp),
        )
        if outcome is None:
            return Saved(False, given)
        match outcome.reply:
            case [1, replaced]:
                self._count("save", "ok" if fits else "oversize")
                orphans = () if (old := _unpacked(replaced)) is None else (old,)
                return Saved(True, orphans if offered else (*orphans, *given), stamp)
            case [0, _]:
                self._count("save", "older")
            case _:
                self._count("save", "unreadable")
        return Saved(False, given)

    async def put_back(self, claimed: Claimed) -> bool:
        """Leave the claimed offer to the next turn. False if its record is no longer there: then release it."""
        if claimed.offer is None:
            return True
        key, stamp, offered = claimed.key, claimed.stamp, _packed(claimed.offer)
        outcome = await self._run(
            "put_back",
            lambda: self._send(PUT_BACK, key, stamp, offered),
            lambda _: self._send(TAKE_OFFER, key, stamp),
        )
        if outcome is None:
            return False
        self._count("put_back", "ok" if outcome.reply == 1 else "gone")
        return bool(outcome.reply == 1)

    async def take_offer(self, key: str, stamp: bytes) -> KVTransferParams | None:
        """The offer saved with this stamp, if nobody has claimed it; the record stays."""

        async def give_back(reply: Any) -> None:
            if reply is not None:
                await self._send(PUT_BACK, key, stamp, reply)

        outcome = await self._run("take_offer", lambda: self._send(TAKE_OFFER, key, stamp), give_back, takes=True)
        if outcome is None:
            return None
        offer = _unpacked(outcome.reply)
        result = "gone" if outcome.reply is None else "unreadable" if offer is None else "ok"
        self._count("take_offer", result)
        return offer

    async def ping(self) -> bool:
        return await self._run("ping", lambda: self._connections.execute("PING"), None) is not None

    async def close(self) -> None:
        """Wait for commands under way, for `timeout` and a little more at most."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self._timeout + LATE_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=LATE_SECONDS)
        await self._connections.close()

    async def _send(self, script: Script, key: str, *arguments: bytes | int) -> Any:
        try:
            return await self._connections.execute("EVALSHA", script.sha, 1, key, *arguments)
        except NoScriptError:
            return await self._connections.execute("EVAL", script.text, 1, key, *arguments)

    async def _run(
        self,
        op: str,
        command: Callable[[], Awaitable[Any]],
        undo: Callable[[Any], Awaitable[Any]] | None,
        *,
        takes: bool = False,
    ) -> _Outcome | None:
        """The command's reply, or None: then it counts as not done, which `undo` makes true of a late one.

        A command that `takes` something out of the store is undone too if its caller is cancelled meanwhile.
        """
        if time.monotonic() < self._paused_until or len(self._tasks) >= MAX_PENDING:
            self._count(op, "skipped")
            return None
        task = self._start(self._attempt(command))
        try:
            in_time = await _ends_within(task, self._timeout)
        except asyncio.CancelledError:
            if takes:
                self._undo(task, undo)
            raise
        if not in_time:
            self._undo(task, undo)
            self._fault(op, "timeout", "TimeoutError")
            return None
        outcome = task.result()
        if outcome.error is None:
            self._answered(op)
            return outcome
        kind = type(outcome.error).__name__
        if isinstance(outcome.error, ResponseError):
            self._refusal(op, kind)
        else:
            slow = isinstance(outcome.error, TimeoutError | RedisTimeoutError)
            self._fault(op, "timeout" if slow else "error", kind)
        return None

    async def _attempt(self, command: Callable[[], Awaitable[Any]]) -> _Outcome:
        try:
            async with asyncio.timeout(self._timeout + LATE_SECONDS):
                return _Outcome(await command())
        except Exception as error:  # of whatever kind: a server may say anything, and it is a miss
            return _Outcome(error=error)

    def _undo(self, task: asyncio.Task[_Outcome], undo: Callable[[Any], Awaitable[Any]] | None) -> None:
        if undo is None:
            return

        async def follow() -> None:
            await asyncio.wait({task})
            if not task.cancelled() and (outcome := task.result()).error is None:
                await self._attempt(lambda: undo(outcome.reply))

        self._start(follow())

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _answered(self, op: str) -> None:
        if self._faults:
            log.info("Redis answers again")
        self._faults = 0
        if op in self._refused:
            self._refused.discard(op)
            if not self._refused:
                log.info("Redis takes commands again")

    def _refusal(self, op: str, why: str) -> None:
        """Redis answered with an error: nobody waits for that, so there is no need to leave it alone."""
        self._count(op, "refused")
        if self._faults:
            log.info("Redis answers again")
        self._faults = 0
        if not self._refused:
            log.warning(
                "Redis refuses commands: turns go on, but conversations are not remembered. "
                "Check its role, its memory limit and the rights of the user in --redis.",
                extra={"why": why},
            )
        self._refused.add(op)

    def _fault(self, op: str, kind: str, why: str) -> None:
        self._count(op, kind)
        self._faults += 1
        if self._faults >= FAULTS_UNTIL_PAUSE:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
        if self._faults == 1:
            log.warning(
                "Redis does not answer: turns go on, but conversations are not remembered. Check --redis.",
                extra={"why": why},
            )

    def _count(self, op: str, result: str) -> None:
        self._metrics.store_operations.labels(op, result).inc()


async def _ends_within(task: asyncio.Task[Any], seconds: float) -> bool:
    """Time in which this process itself was busy does not count: the reply may be here, and only has to be read."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + seconds
    await _end_or_time(task, seconds)
    if not task.done() and (overslept := loop.time() - limit) > 0:
        await _end_or_time(task, min(overslept, seconds))
    return task.done()


async def _end_or_time(task: asyncio.Task[Any], seconds: float) -> None:
    """`asyncio.wait` for one task, at a third of its cost."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def wake(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    timer = loop.call_later(seconds, wake)
    task.add_done_callback(wake)
    try:
        await over
    finally:
        timer.cancel()
        task.remove_done_callback(wake)


def _read(key: str, reply: Any) -> tuple[Claimed | None, str]:
    """What a claim found, and what to count it as."""
    match reply:
        case [None, None, None, None]:
            return None, "miss"
        case [bytes() as data, offered, bytes() as stamp, bytes() as turn] if len(stamp) == STAMP_BYTES:
            pass
        case _:
            return None, "unreadable"
    try:
        record = Record.unpack(data)
    except ValueError:
        return None, "unreadable"
    if turn != str(record.turn).encode():
        return None, "unreadable"
    offer = _unpacked(offered)
    result = "hit" if offer is not None else "hit_without_offer" if offered is None else "hit_unreadable_offer"
    return Claimed(key, record, offer, stamp), result


def _stamp(reply: Any) -> bytes:
    match reply:
        case [_, _, bytes() as stamp, _]:
            return stamp
    return b""


def _packed(offer: KVTransferParams | None) -> bytes:
    """Nothing for what cannot be written: an engine may have put anything into its params."""
    try:
        return b"" if offer is None else pack_offer(offer)
    except ValueError:
        return b""


def _unpacked(offered: Any) -> KVTransferParams | None:
    try:
        return unpack_offer(offered) if isinstance(offered, bytes) else None
    except ValueError:
        return None

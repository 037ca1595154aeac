"""Conversation records in Redis or Valkey: a cache, and treated as one.

No fault of it reaches a client: an error, a timeout or a value nobody can read is a miss, counted. A record may be read
by any number of turns; the decode engine's offer beside it is taken by one of them only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from redis.exceptions import NoScriptError, ResponseError

from connectors.wire.transfer import KVTransferParams
from router.metrics import Metrics
from router.record import Record, pack_offer, unpack_offer
from router.redis_client import open_redis
from router.redis_link import Command, Late
from router.scripts import CLAIM, DROP, PUT_BACK, SAVE, TAKE_OFFER, Script

FAULTS_UNTIL_PAUSE: Final = 3
NUM_LATENCIES: Final = 256
"""Of the last operations, by which Redis's health is told."""
PAUSE_SECONDS: Final = 1.0
MAX_TTL_MS: Final = 2**40
STAMP_BYTES: Final = 16

_NONE: Final = object()
"""It was not done."""
_LOST: Final = object()
"""It was sent, and nobody knows what became of it."""

log = logging.getLogger("router.store")


@dataclass(slots=True)
class Claimed:
    """A record as found, and the offer if this turn is the one that took it."""

    key: str
    record: Record
    offer: KVTransferParams | None
    stamp: bytes
    """Of the one save that wrote the record."""


@dataclass(slots=True)
class Saved:
    kept: bool
    """Redis has the record now."""
    orphans: tuple[KVTransferParams, ...]
    """Offers nobody will use any more: the replaced record's unclaimed one, or the given one if it was not kept."""
    stamp: bytes = b""
    """Of this save; empty if it was not kept."""
    is_certain: bool = True
    """Whether the given offer, if it is an orphan, cannot be found in the store by anybody."""


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
        password_file: Path | None = None,
        timeout: float = 0.05,
        metrics: Metrics,
        max_record_bytes: int = 4 << 20,
    ) -> None:
        """Raises ValueError for a URL that is none."""
        self._metrics = metrics
        self._max_record_bytes = max_record_bytes
        self._link = open_redis(url, password_file, timeout=timeout)
        self._faults = 0
        self._paused_until = 0.0
        self._refused: set[str] = set()
        self._fault_why = ""
        self._seconds: deque[float] = deque(maxlen=NUM_LATENCIES)

    async def claim(self, key: str | None) -> Claimed | None:
        """The conversation's record, with its offer for the first who asks; None if there is none to be had."""
        if key is None:
            return None

        def give_back(reply: Any, _: bool) -> None:
            match reply:
                case [_, bytes() as offered, bytes() as stamp, _]:
                    self._start(PUT_BACK, key, stamp, offered)

        reply = await self._run("claim", CLAIM, key, late=give_back)
        if reply is _NONE or reply is _LOST:
            return None
        claimed, result = _read(key, reply)
        self._count("claim", result)
        if claimed is None and result == "unreadable":
            self._start(DROP, key, _stamp(reply))
        return claimed

    async def save(
        self,
        key: str,
        record: Record,
        offer: KVTransferParams | None,
        left: Callable[[Saved], None] = lambda _: None,
    ) -> Saved:
        """Put the record into the store until its deadline; a record of a higher turn stays. If the caller is cancelled
        it is saved all the same, and `left` gets what came of it."""
        given = () if offer is None else (offer,)
        remaining_ms = int(1000 * (record.deadline - time.time()))
        if remaining_ms <= 0:
            self._count("save", "late")
            return Saved(False, given)
        data, offered = record.pack(), _packed(offer)
        fits = len(data) + len(offered) <= self._max_record_bytes
        if not fits:
            data, offered = replace(record, token_ids=array("I"), media=()).pack(), b""
        stamp = os.urandom(STAMP_BYTES)
        arguments = (record.turn, stamp, min(remaining_ms, MAX_TTL_MS), data, offered)
        saving = _Saving(self, key, given, left, stamp, fits, arguments)
        return saving.saved(await self._run("save", SAVE, key, *arguments, late=saving.late))

    async def put_back(self, claimed: Claimed) -> bool | None:
        """Leave the claimed offer to the next turn. False if its record is no longer there: then release it. None if
        nobody knows."""
        if claimed.offer is None:
            return True
        key, stamp, offered = claimed.key, claimed.stamp, _packed(claimed.offer)

        def take_again(reply: Any, cancelled: bool) -> None:
            if reply == 1 and not cancelled:
                self._start(TAKE_OFFER, key, stamp)

        reply = await self._run("put_back", PUT_BACK, key, stamp, offered, late=take_again)
        if reply is _NONE or reply is _LOST:
            return False if reply is _NONE else None
        self._count("put_back", "ok" if reply == 1 else "gone")
        return bool(reply == 1)

    async def take_offer(self, key: str, stamp: bytes) -> KVTransferParams | None:
        """The offer saved with this stamp, if nobody has claimed it; the record stays."""

        def give_back(reply: Any, _: bool) -> None:
            if isinstance(reply, bytes):
                self._start(PUT_BACK, key, stamp, reply)

        reply = await self._run("take_offer", TAKE_OFFER, key, stamp, late=give_back)
        if reply is _NONE or reply is _LOST:
            return None
        offer = _unpacked(reply)
        self._count("take_offer", "gone" if reply is None else "unreadable" if offer is None else "ok")
        return offer

    @property
    def num_pending(self) -> int:
        """Commands under way, those included that nobody waits for any more."""
        return self._link.num_pending

    async def ping(self) -> bool:
        if time.monotonic() < self._paused_until:
            return False
        started = time.perf_counter()
        reply = await self._reply(self._link.send("PING"))
        self._seconds.append(time.perf_counter() - started)
        if isinstance(reply, Exception):
            self._failed("ping", reply)
            return False
        self._answered("ping")
        return True

    def health(self) -> dict[str, Any]:
        """How Redis is, as of the last operations."""
        state = "silent" if self._faults else "refuses" if self._refused else "ok"
        ordered = sorted(self._seconds)
        shares = {"p50": 0.5, "p99": 0.99} if ordered else {}
        return {
            "state": state,
            "why": self._fault_why if state != "ok" else "",
            "pending": self.num_pending,
            "latency_ms": {name: round(1000 * ordered[int(at * (len(ordered) - 1))], 3) for name, at in shares.items()},
        }

    async def close(self) -> None:
        """Wait for commands under way, for `timeout` and a little more at most."""
        await self._link.close()

    def _start(self, script: Script, key: str, *arguments: bytes | int) -> None:
        """Without waiting for it. By its text: who forgets scripts would have to be asked twice."""
        if not self._link.is_full:
            self._link.send("EVAL", script.text, 1, key, *arguments)

    async def _run(self, op: str, script: Script, key: str, *arguments: bytes | int, late: Late) -> Any:
        """The reply; or `_NONE` or `_LOST`: then it counts as not done, which `late` makes true if a reply still
        comes."""
        if time.monotonic() < self._paused_until or self._link.is_full:
            self._count(op, "skipped")
            return _NONE
        started = time.perf_counter()  # the loop's clock has steps of a millisecond, which is long for Redis
        reply = await self._reply(self._link.send("EVALSHA", script.sha, 1, key, *arguments, late=late))
        if isinstance(reply, NoScriptError):
            reply = await self._reply(self._link.send("EVAL", script.text, 1, key, *arguments, late=late))
        seconds = time.perf_counter() - started
        self._seconds.append(seconds)
        self._metrics.store_seconds.observe(op, seconds)
        if isinstance(reply, Exception):
            return self._failed(op, reply)
        if self._faults or self._refused:
            self._answered(op)
        return reply

    def _failed(self, op: str, error: Exception) -> object:
        if isinstance(error, ResponseError):
            self._refusal(op, _why(error))
            return _NONE
        self._fault(op, "timeout" if isinstance(error, TimeoutError) else "error", type(error).__name__)
        return _LOST

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
        self._fault_why = why
        if not self._refused:
            log.warning(
                "Redis refuses commands: turns go on, but conversations are not remembered. "
                "Check its role, its memory limit and the rights of the user in --redis.",
                extra={"why": why},
            )
        self._refused.add(op)

    def _fault(self, op: str, kind: str, why: str) -> None:
        self._count(op, kind)
        self._fault_why = why
        self._faults += 1
        if self._faults >= FAULTS_UNTIL_PAUSE:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
        if self._faults == 1:
            log.warning(
                "Redis does not answer: turns go on, but conversations are not remembered. Check --redis.",
                extra={"why": why},
            )

    async def _reply(self, command: Command) -> Any:
        """The reply, or an exception as a value."""
        try:
            return await command.future
        except asyncio.CancelledError:
            command.leave()
            raise

    def _count(self, op: str, result: str) -> None:
        self._metrics.store_operations.add(op, result)


class _Saving:
    """A save under way: what its reply means, in time or late. An object of its own since functions that name each
    other would keep all of their turn until the garbage collector comes."""

    __slots__ = ("_arguments", "_fits", "_given", "_key", "_left", "_stamp", "_store")

    def __init__(
        self,
        store: Store,
        key: str,
        given: tuple[KVTransferParams, ...],
        left: Callable[[Saved], None],
        stamp: bytes,
        fits: bool,
        arguments: tuple[bytes | int, ...],
    ) -> None:
        """`given`: the offer to be saved, if there is one; `fits`: the record is saved with all of its parts, and the
        offer."""
        self._store = store
        self._key = key
        self._given = given
        self._left = left
        self._stamp = stamp
        self._fits = fits
        self._arguments = arguments

    def saved(self, reply: Any) -> Saved:
        match reply:
            case [1, replaced]:
                self._store._count("save", "ok" if self._fits else "oversize")
                orphans = () if (old := _unpacked(replaced)) is None else (old,)
                is_offered = bool(self._arguments[-1])
                return Saved(True, orphans if is_offered else (*orphans, *self._given), self._stamp)
            case [0, _]:
                self._store._count("save", "older")
            case Exception():
                return Saved(False, self._given, is_certain=isinstance(reply, ResponseError))
            case _ if reply is _LOST:
                return Saved(False, self._given, is_certain=False)
            case _ if reply is not _NONE:
                self._store._count("save", "unreadable")
        return Saved(False, self._given)

    def late(self, reply: Any, cancelled: bool) -> None:
        store, key = self._store, self._key
        if cancelled and isinstance(reply, NoScriptError) and not store._link.is_full:
            store._link.send("EVAL", SAVE.text, 1, key, *self._arguments, late=self.late).future.cancel()
        elif cancelled:
            self._left(self.saved(reply))
        elif not isinstance(reply, Exception):
            store._start(TAKE_OFFER, key, self._stamp)
            match reply:  # what it has replaced is nobody's now
                case [1, replaced] if (old := _unpacked(replaced)) is not None:
                    self._left(Saved(False, (old,)))


def _why(error: ResponseError) -> str:
    """The word that Redis's errors begin with: OOM, NOPERM, MOVED."""
    word = str(error).partition(" ")[0]
    return word if word.isalpha() and word.isupper() and len(word) < 20 else type(error).__name__


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

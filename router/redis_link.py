"""Commands to Redis over one connection, any number of them under way.

Redis answers in the order in which it was asked, so replies find their commands without anything being lent or waited
for. A command goes on when its caller no longer waits; its reply then goes to `late`. What cannot be matched any more
ends the connection, and the next command makes another; what fails again and again is left alone for up to a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from hiredis import Reader, pack_command
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from router.redis_backoff import Backoff

LATE_SECONDS: Final = 1.0
"""How long after its time a reply is still awaited, for `late`; then the connection is given up."""
MAX_PENDING: Final = 1024
MAX_UNSENT_BYTES: Final = 64 << 20
"""Of commands that Redis does not take."""

Late = Callable[[Any, bool], None]
Connect = Callable[[], Awaitable[AbstractConnection]]


class MovedError(ResponseError):
    """Another node of the cluster has the key. (redis-py's own would take its text apart, and raise if it cannot.)"""


class AskError(ResponseError):
    """Another node of the cluster has the key, or will have: ask it this once."""


_INCOMPLETE: Final = object()
_ERRORS: Final[dict[str, Callable[[str], RedisError]]] = {
    "NOSCRIPT": NoScriptError,
    "READONLY": ReadOnlyError,
    "LOADING": BusyLoadingError,
    "MOVED": MovedError,
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
}
"""Those that are told from others, by their first word."""


class Command:
    """A command under way. Its future gets the reply, or an exception as a value."""

    __slots__ = ("data", "future", "is_dropped", "is_left", "late", "started")

    def __init__(self, data: bytes, future: asyncio.Future[Any], late: Late | None, started: float) -> None:
        self.data = data
        self.future = future
        self.late = late
        self.is_dropped = False
        """It was never sent, and will not be."""
        self.is_left = False
        """Nobody was told what the future has."""
        self.started = started

    def settle(self, reply: Any) -> None:
        if not self.future.done():
            self.future.set_result(reply)
        elif self.late is not None:
            self.late(reply, self.is_left or self.future.cancelled())

    def leave(self) -> None:
        """Whoever waits has been cancelled; the future may have something all the same."""
        self.is_left = True
        if self.future.cancelled():
            return
        reply = self.future.result()
        if self.is_dropped or not isinstance(reply, TimeoutError):  # else the reply may still come
            self.settle(reply)


class Link:
    def __init__(self, connect: Connect, *, timeout: float) -> None:
        """`connect` makes a connection, each time to whichever server it is to be; `timeout`: seconds until a command's
        future gets a TimeoutError."""
        self.timeout = timeout
        self._make_connection = connect
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff()
        self._line: _Line | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unsent: deque[Command] = deque()
        """Waiting for a connection."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    @property
    def num_pending(self) -> int:
        """Commands without a reply, those included that nobody waits for any more."""
        return len(self._unsent) + (len(self._line.asked) if self._line else 0)

    @property
    def is_full(self) -> bool:
        return self.num_pending >= MAX_PENDING or (
            self._line is not None and self._line.num_unsent_bytes > MAX_UNSENT_BYTES
        )

    def send(self, *command: str | bytes | int, late: Late | None = None) -> Command:
        """`late` gets a reply, or an exception, that comes when the future is done, and whether it was cancelled."""
        data = pack_command(command)  # type: ignore[arg-type]  # typed as if it took one argument
        sent = Command(data, self._loop.create_future(), late, self._loop.time())
        self.put(sent)
        return sent

    def put(self, command: Command) -> None:
        """Send a command that has been made; it need not be a new one."""
        if self._line is not None:
            self._line.send(command)
        elif self._connecting is not None:
            self._unsent.append(command)
        elif self._loop.time() < self._backoff.until:
            command.settle(RedisConnectionError("connecting has just failed"))
            return
        else:
            self._unsent.append(command)
            self._connecting = asyncio.create_task(self._connect(), name="connect to Redis")
        self._idle.clear()
        self._look_at(command.started + self.timeout)

    async def close(self) -> None:
        """Wait for what is under way, for the time it may take at most, then hang up."""
        try:
            async with asyncio.timeout(self.timeout + LATE_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            pass
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._line is not None:
            self._line.end("closed")
        self._fail_unsent(RedisConnectionError("closed"))
        if self._timer is not None:
            self._timer.cancel()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self.timeout + LATE_SECONDS):
                connection = await self._make_connection()
            self._line = _Line(self._loop, connection, self._ended, self._answered)
        except Exception as error:  # of whatever kind: a server may say anything
            self._backoff.failed(self._loop.time())
            self._fail_unsent(error)
        else:
            while self._unsent:
                self._line.send(self._unsent.popleft())
        finally:
            self._connecting = None

    def _ended(self, line: _Line) -> None:
        if self._line is line:
            self._line = None
            self._backoff.failed(self._loop.time())

    def _answered(self) -> None:
        if self.num_pending == 0:
            self._idle.set()

    def _fail_unsent(self, error: Exception) -> None:
        while self._unsent:
            self._unsent.popleft().settle(error)
        self._answered()

    def _look_at(self, due: float) -> None:
        """See to it that somebody looks by then."""
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        """Some command's time may be over. Time in which this process itself was busy does not count: the reply may
        be here, and only has to be read."""
        if (overslept := self._loop.time() - due) > 0.001:
            self._timer = self._loop.call_later(min(overslept, self.timeout), self._expire)
        else:
            self._expire()

    def _expire(self) -> None:
        now = self._loop.time()
        late = now - self.timeout
        while self._unsent and self._unsent[0].started <= late:
            dropped = self._unsent.popleft()
            dropped.is_dropped = True
            dropped.settle(TimeoutError())
        line = self._line
        if line is not None and line.asked and line.asked[0].started <= late - LATE_SECONDS:
            line.end("no reply")
        pending = list(self._unsent) + (list(line.asked) if line else [])
        for command in pending:
            if command.started <= late and not command.future.done():
                command.future.set_result(TimeoutError())
        self._answered()
        waits = [one.started + self.timeout + (LATE_SECONDS if one.started <= late else 0.0) for one in pending]
        self._timer = None
        if self.num_pending and waits:
            self._look_at(max(now, min(waits)))


class _Line(asyncio.Protocol):
    """A connection that redis-py has made and prepared, read without its layers. What is sent within a round of the
    event loop is written in one go: a write is a call to the system, and wakes the server."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: AbstractConnection,
        ended: Callable[[_Line], None],
        answered: Callable[[], None],
    ) -> None:
        self.asked: deque[Command] = deque()
        self._loop = loop
        self._gathered: list[bytes] = []
        self._ended = ended
        self._answered = answered
        self._replies = Reader(
            protocolError=InvalidResponse,
            replyError=_error,
            notEnoughData=_INCOMPLETE,
        )
        self._writer = _taken(connection)
        """Kept: it would close the transport when it dies."""
        self._transport = cast(asyncio.Transport, self._writer.transport)
        self._transport.set_protocol(self)

    @property
    def num_unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._gathered))

    def send(self, command: Command) -> None:
        self.asked.append(command)
        if not self._gathered:
            self._loop.call_soon(self._write)
        self._gathered.append(command.data)

    def _write(self) -> None:
        data = b"".join(self._gathered)
        self._gathered.clear()
        if data:  # else the connection has ended meanwhile
            self._transport.write(data)

    def end(self, why: str) -> None:
        self._ended(self)
        self._gathered.clear()
        self._transport.abort()  # to close would be to send first what a server that hangs has not taken
        while self.asked:
            self.asked.popleft().settle(RedisConnectionError(why))
        self._answered()

    def data_received(self, data: bytes) -> None:
        try:
            self._replies.feed(data)
            while (reply := self._replies.gets()) is not _INCOMPLETE:
                if not self.asked:
                    return self.end("something was said that nobody had asked")
                self.asked.popleft().settle(reply)
                if isinstance(reply, ReadOnlyError):
                    # The server is no longer the one to write to: who is must be looked up again.
                    return self.end("no longer the one to write to")
        except InvalidResponse as error:
            return self.end(str(error))
        if not self.asked:
            if self._replies.has_data():
                return self.end("something was said that nobody had asked")
            self._answered()
        return None

    def eof_received(self) -> None:
        self.end("closed by the server")

    def connection_lost(self, error: Exception | None) -> None:
        self.end("closed by the server")


def _error(message: str) -> RedisError:
    return _ERRORS.get(message.partition(" ")[0], ResponseError)(message)


def _taken(connection: AbstractConnection) -> asyncio.StreamWriter:
    """What a connection writes with, which from here on is not its own."""
    writer = connection._writer
    assert writer is not None
    connection._writer = connection._reader = None
    return writer

"""A bounded set of connections to Redis, each lent to one command at a time.

A connection is kept only after a whole reply was read from it. Whatever else happens to a command, its being cancelled
included, ends the connection: so a late reply is never taken for that of the next command, and none is lent for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hiredis import pack_command
from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, ResponseError


class Connections:
    """At most `limit` connections. A command waits for a free one for `patience` seconds."""

    def __init__(self, url: str, *, limit: int, patience: float) -> None:
        self._factory = ConnectionPool.from_url(
            url,
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,  # two commands less for a new connection
        )
        self._patience = patience
        self._room = asyncio.Semaphore(limit)
        self._idle: list[Connection] = []
        self._lent = 0

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_lent(self) -> int:
        return self._lent

    async def execute(self, *command: str | bytes | int) -> Any:
        """The reply. Raises RedisError, OSError, ValueError, or TimeoutError if no connection gets free in time; how
        long connecting and the exchange itself may take is the caller's affair."""
        if self._room.locked():
            async with asyncio.timeout(self._patience):
                await self._room.acquire()
        else:
            await self._room.acquire()  # at once
        connection = self._idle.pop() if self._idle else self._new()
        self._lent += 1
        try:
            reply = await _exchange(connection, command)
        except ReadOnlyError:
            # The server is no longer the one to write to: look up again who is, for the idle ones too.
            await _end(connection)
            await self._end_idle()
            raise
        except ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:
            await _end(connection)
            raise
        else:
            self._idle.append(connection)
            return reply
        finally:
            self._lent -= 1
            self._room.release()

    async def close(self) -> None:
        """End the idle connections; those lent end with their commands, which the caller has cancelled."""
        await self._end_idle()

    async def _end_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await _end(connection)

    def _new(self) -> Connection:
        connection: Connection = self._factory.make_connection()  # type: ignore[no-untyped-call]
        return connection


async def _exchange(connection: Connection, command: tuple[str | bytes | int, ...]) -> Any:
    if connection.is_connected and await connection.can_read():
        await _end(connection)  # closed by the server meanwhile, or it said something nobody had asked
    if not connection.is_connected:
        await connection.connect()  # type: ignore[no-untyped-call]
    packed = pack_command(command)  # type: ignore[arg-type]  # typed as if it took one argument
    await connection.send_packed_command(packed, check_health=False)  # `send_command` would pack it in Python
    return await connection.read_response()


async def _end(connection: Connection) -> None:
    # Closing would first try to send what a server that hangs has not taken, and keep that in memory meanwhile.
    if (writer := getattr(connection, "_writer", None)) is not None:
        writer.transport.abort()
    await connection.disconnect(nowait=True)

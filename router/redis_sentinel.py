"""The master of a service, found anew for each connection by asking sentinels.

Who is master may change at any time, and a sentinel that was away may still name the last one: a server counts only
if it says itself that it is the master.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError

from router.redis_address import Endpoint, RedisAddress
from router.redis_connection import ask, connect


class Sentinels:
    def __init__(self, address: RedisAddress, *, step_seconds: float) -> None:
        """`step_seconds`: what one server may take to answer; then the next is asked."""
        self._address = address
        self._step_seconds = step_seconds
        self._sentinels = list(address.endpoints)
        """Who knew the master last time comes first."""

    async def connect(self) -> AbstractConnection:
        """A connection to the master. Raises if no sentinel names one that is there."""
        seen: set[Endpoint] = set()
        last: Exception | None = None
        for sentinel in tuple(self._sentinels):
            try:
                async with asyncio.timeout(self._step_seconds):
                    master = await self._master(sentinel)
                if master in seen:
                    continue
                seen.add(master)
                async with asyncio.timeout(self._step_seconds):
                    connection = await self._connect(master)
            except Exception as error:  # of whatever kind: the next may know better
                last = error
                continue
            self._sentinels.remove(sentinel)
            self._sentinels.insert(0, sentinel)
            return connection
        raise RedisConnectionError("no sentinel names a master that is there") from last

    async def _master(self, sentinel: Endpoint) -> Endpoint:
        connection = await connect(self._address.sentinels, sentinel)
        try:
            reply = await ask(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        finally:
            await connection.disconnect(nowait=True)
        match reply:
            case [bytes() as host, bytes() as port]:
                return Endpoint(host.decode(), int(port))
        raise RedisConnectionError("the sentinel does not know the service")

    async def _connect(self, master: Endpoint) -> AbstractConnection:
        connection = await connect(self._address.data, master)
        try:
            role: Any = await ask(connection, "ROLE")
            if not isinstance(role, list) or role[:1] != [b"master"]:
                raise RedisConnectionError("who was named is not the master")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

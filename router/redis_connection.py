"""A connection to one Redis server: made, encrypted and logged in, not yet used."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from router.redis_address import Access, Endpoint, read_password


async def connect(access: Access, endpoint: Endpoint) -> AbstractConnection:
    """Without a limit of time of its own. Files are read anew each time: passwords and certificates are changed."""
    if access.tls or access.password_file is not None:
        connection = await asyncio.to_thread(_made, access, endpoint)
    else:
        connection = _made(access, endpoint)
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return connection


async def ask(connection: AbstractConnection, *command: str) -> Any:
    """The reply to one command, before the connection is anybody's."""
    await connection.send_command(*command)
    return await connection.read_response()


def _made(access: Access, endpoint: Endpoint) -> AbstractConnection:
    options: dict[str, Any] = {
        **access.options,
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,  # two commands less for a new connection
    }
    if access.password_file is not None:
        options["password"] = read_password(access.password_file)
    if not endpoint.port:
        return UnixDomainSocketConnection(path=endpoint.host, **options)
    if not access.tls:
        return Connection(host=endpoint.host, port=endpoint.port, **options)
    connection = SSLConnection(host=endpoint.host, port=endpoint.port, **options)
    connection.ssl_context.get()  # reads the certificates here, off the event loop
    return connection

"""Servers that are no Redis, but are where one is looked for."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class Forwarder:
    """One address, behind it whatever server `port` says when a connection begins."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def forwarder(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Forwarder]:
    """Takes TLS off, if so it is told."""
    forwarder = Forwarder(port)
    async with serving(forwarder.serve, tls) as forwarder.url:
        yield forwarder


@asynccontextmanager
async def serving(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """The address of a server that treats every connection so."""
    handlers: set[asyncio.Task[object]] = set()
    writers: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        writers.add(writer)
        try:
            await serve(reader, writer)
        except ConnectionError:
            pass

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        if handlers:
            await asyncio.wait(handlers, timeout=5)
        await server.wait_closed()


@asynccontextmanager
async def sentinel(master: Callable[[], int | None], tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """HOST:PORT of a sentinel that names the port of this master, whatever it is asked, or says nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            if (port := master()) is not None:
                writer.write(b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(port)), port))

    async with serving(serve, tls) as url:
        yield url.removeprefix("redis://").removesuffix("/0")

"""A TCP proxy that makes trouble: in front of an engine, it is the network between it and the routers."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

PIECE = 64
"""Bytes that get through at once while the network is slow."""
CHUNK = 1 << 16


@dataclass
class Trouble:
    """Listens on `port` and passes on to `target`, both on this machine."""

    port: int
    target: int
    latency: float = 0.0
    """Seconds each piece takes; 0: as it comes."""
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: connections are taken, and nothing gets through."""
    _server: asyncio.Server | None = None
    _pairs: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = field(default_factory=dict)
    _rng: random.Random = field(default_factory=random.Random)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        """From here on connections are taken."""
        if self._server is None:
            self._open.set()
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def refuse(self) -> None:
        """As where nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Every connection breaks off, both sides see a reset."""
        for writers in self._pairs.values():
            for writer in writers:
                writer.transport.abort()

    def stall(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        """What was held up goes on."""
        self.latency = 0.0
        self._open.set()

    async def close(self) -> None:
        await self.refuse()
        self._open.set()
        for task in list(self._pairs):
            task.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        writers = self._pairs[task] = [writer]
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(back)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, back))
                group.create_task(self._pass_on(there, writer))
        except* (OSError, asyncio.CancelledError):
            for each in writers:
                each.transport.abort()
        finally:
            for each in writers:
                each.close()
            del self._pairs[task]

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the end of it; then the other side is told that it is over, in both directions: HTTP knows no half
        connections."""
        while data := await reader.read(CHUNK):
            for piece in self._pieces(data):
                await self._open.wait()
                if self.latency:
                    await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self.latency)
                writer.write(piece)
                await writer.drain()
        await self._open.wait()
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()

    def _pieces(self, data: bytes) -> list[bytes]:
        return [data[at : at + PIECE] for at in range(0, len(data), PIECE)] if self.latency else [data]

"""The processes of one router, and how one of them hears from all: through their parent, over a pair of sockets.

A question has a kind and a body, and so has what it is answered by: whoever may be asked says `answer(kind, how)`,
and `gather` has every process asked, this one included. A router of one process asks itself, without any socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import orjson

from connectors.wire.openai import unavailable

GATHER_SECONDS: Final = 2.0
"""That a process has to answer; the answers of one that is late are not among those of the others."""
PATIENCE_SECONDS: Final = 4.0
"""That the parent has."""
SNAPSHOT_SECONDS: Final = 1.0
"""Between two snapshots of what a process has counted, so many seconds of which are lost if it is killed."""
MAX_FRAME_BYTES: Final = 64 << 20
SNAPSHOT: Final = "snapshot"
METRICS: Final = "metrics"

Answer = Callable[[bytes], Awaitable[bytes]]

log = logging.getLogger("router.siblings")


class Frame(NamedTuple):
    """What passes between a process and the parent. `op`:

    listens  a process takes requests
    snapshot a process tells what it has counted so far
    ask      a process asks all of them, or the parent one of them
    reply    a process answers the parent
    replies  the parent answers a process
    go       the parent says that all processes listen
    """

    op: str
    number: int = 0
    """Of a question, given by who asks."""
    kind: str = ""
    keep: str = ""
    """Of a question that processes started later are to be asked too: in place of an earlier one under this name."""
    bodies: Sequence[bytes] = ()

    def pack(self) -> bytes:
        head = orjson.dumps([self.op, self.number, self.kind, self.keep, [len(body) for body in self.bodies]]) + b"\n"
        size = len(head) + sum(map(len, self.bodies))
        return b"".join([size.to_bytes(4), head, *self.bodies])

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        head, _, rest = data.partition(b"\n")
        op, number, kind, keep, sizes = orjson.loads(head)
        bodies, start = [], 0
        for size in sizes:
            bodies.append(rest[start : start + size])
            start += size
        return cls(op, number, kind, keep, bodies)


class Frames:
    """Puts frames together again from the pieces in which they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Those that are whole now; take them all. Raises ValueError for what is none, after those before it."""
        self._data += data
        while len(self._data) >= 4:
            size = int.from_bytes(self._data[:4])
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._data) < 4 + size:
                break
            whole = bytes(self._data[4 : 4 + size])
            del self._data[: 4 + size]
            yield Frame.unpack(whole)


class Siblings:
    """All processes of this router, this one included."""

    def __init__(self) -> None:
        self.all_listen = True
        """False while processes are started for the first time."""
        self._answers: dict[str, Answer] = {}
        self._link: _Link | None = None

    def answer(self, kind: str, how: Answer) -> None:
        """This process answers questions of this kind so."""
        self._answers[kind] = how

    async def gather(self, kind: str, body: bytes = b"", *, keep: str = "") -> list[bytes]:
        """What all processes answer to this question, without those that cannot in time. With `keep`, processes that
        are started later are asked it too, in place of an earlier question under this name.

        Raises APIError, 503, if it cannot be passed on."""
        if self._link is None:
            return [await self._answers[kind](body)]
        return await self._link.ask(kind, body, keep)

    async def connect(self, channel: socket.socket, ended: Callable[[], None]) -> None:
        """Talk with the parent from here on; `ended` is called if it is no longer there."""
        self.all_listen = False
        self._link = _Link(self, self._answers, ended)
        await self._link.open(channel)

    def listens(self) -> None:
        """This process takes requests."""
        if self._link is not None:
            self._link.send(Frame("listens"))

    async def close(self) -> None:
        """Tell what was counted up to now, and hang up."""
        if self._link is not None:
            await self._link.close()


class _Link:
    """One process's end of the pair."""

    def __init__(self, siblings: Siblings, answers: dict[str, Answer], ended: Callable[[], None]) -> None:
        self._siblings = siblings
        self._answers = answers
        self._ended = ended
        self._asked: dict[int, asyncio.Future[Sequence[bytes]]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter

    async def open(self, channel: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=channel)
        self._start(self._read(reader))
        self._start(self._tell())

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send(self, frame: Frame) -> None:
        if not self._writer.transport.is_closing():  # else the parent is gone, and so are we soon
            self._writer.write(frame.pack())

    async def ask(self, kind: str, body: bytes, keep: str) -> list[bytes]:
        self._number += 1
        number = self._number
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(Frame("ask", number, kind, keep, [body]))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return list(await future)
        except TimeoutError:
            raise unavailable("The router's processes do not answer. Try again in a moment.", retry_after=1) from None
        finally:
            del self._asked[number]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._snapshot()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        with suppress(ConnectionError, ValueError):
            while data := await reader.read(1 << 16):
                for frame in frames.feed(data):
                    self._take(frame)
        self._ended()

    def _take(self, frame: Frame) -> None:
        match frame.op:
            case "ask":
                self._start(self._reply(frame))
            case "replies":
                future = self._asked.get(frame.number)
                if future is not None and not future.done():
                    future.set_result(frame.bodies)
            case "go":
                self._siblings.all_listen = True

    async def _reply(self, frame: Frame) -> None:
        how = self._answers.get(frame.kind)
        if how is None:
            return  # of a kind that only others answer
        try:
            self.send(Frame("reply", frame.number, frame.kind, bodies=[await how(frame.bodies[0])]))
        except Exception:
            log.exception("no answer", extra={"kind": frame.kind})

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            await self._snapshot()

    async def _snapshot(self) -> None:
        self.send(Frame("snapshot", bodies=[await self._answers[SNAPSHOT](b"")]))

"""One connection to a server, HTTP/1.1: a request is written, and its answer handed over as it comes.

ClientError             an exchange that did not come to its end
+-- ConnectFailed       there is no connection: nobody listens, no such name, no TLS
|   +-- ConnectTimeout  nor was it refused
+-- Exhausted           this machine has no descriptor, port or memory for one more connection
+-- Disconnected        the peer closed before the end of the answer
+-- ProtocolError       what came is no answer
+-- TooLarge            the answer has more bytes than the caller wants
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from httptools import HttpParserError, HttpResponseParser
from multidict import CIMultiDict, CIMultiDictProxy

MAX_BUFFERED_BYTES: Final = 256 << 10
"""Of an answer that nobody reads; beyond it the peer has to wait."""
MAX_BARREN_BYTES: Final = 64 << 10
"""Of an answer, in a row, that bring nothing of its body: headers, trailers, and what is written beside chunks."""
IN_ONE_PIECE_BYTES: Final = 512 << 10
SLICE_BYTES: Final = 256 << 10


class ClientError(Exception):
    pass


class ConnectFailed(ClientError):
    pass


class ConnectTimeout(ConnectFailed):
    pass


class Exhausted(ClientError):
    pass


class Disconnected(ClientError):
    def __init__(self, *, stale: bool) -> None:
        super().__init__("the connection was closed before the end of the answer")
        self.stale = stale
        """On a connection from before, and with nothing of the answer: it may have been closed as we sent."""


class ProtocolError(ClientError):
    pass


class TooLarge(ClientError):
    pass


class Connection(asyncio.Protocol):
    """Its methods are called by asyncio, by the parser (`on_…`), and by the one whose request it carries."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[], None] | None = None) -> None:
        """`on_lost`: called when the peer closes it though it could have been used again."""
        self.idle_since = 0.0
        self.heard_at = loop.time()
        """When something last came."""
        self.is_open = False
        self.done = True
        """Nothing more of an answer is due."""
        self.status = 0
        """Of the answer; 0 until its headers are complete."""
        self.headers: CIMultiDictProxy[str]
        self._loop = loop
        self._on_lost = on_lost
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # called by the parser for every chunk
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._due: float | None = None
        """When it is to stop waiting."""
        self._timer: asyncio.TimerHandle | None = None
        self._error: ClientError | None = None
        self._reused = False
        self._reusable = True
        self.has_begun = False
        """Whether anything of the answer has come."""
        self._ends_by_close = False
        self._raw_headers: list[bytes] = []
        """Names and values in turns."""
        self._num_buffered = 0
        self._num_barren = 0
        self._must_not_write = False
        self._wants_much = False
        """Whoever waits need not be told of each part."""
        self._is_given_up = False

    # What a request does with it.

    # `due` is when to stop waiting, in event loop time; it raises TimeoutError then.

    async def send(self, head: bytes, body: bytes, due: float | None = None) -> None:
        """Write a request. Raises ClientError."""
        if not self.is_open:
            raise Disconnected(stale=self._reused)
        self._begin()
        if len(body) < IN_ONE_PIECE_BYTES:
            self._transport.write(head + body)
        else:
            await self._send_slices(head, body, due)

    async def begun(self, due: float | None = None) -> None:
        """Wait for the headers of the answer."""
        while not self.status:
            await self._wait(due)

    async def readany(self, due: float | None = None) -> bytes:
        """What has come of the body, as soon as anything has; b"" at its end."""
        while not (data := self.take()) and not self.done:
            await self._wait(due)
        return data

    async def readmany(self, due: float | None = None) -> bytes:
        """What is left of the body, or as much of it as is held at a time; b"" at its end."""
        self._wants_much = True
        try:
            while not self.done and self._num_buffered <= MAX_BUFFERED_BYTES:
                await self._wait(due)
        finally:
            self._wants_much = False
        return self.take()

    def take(self) -> bytes:
        """What has come of the body; b"" if nothing has."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._num_buffered > MAX_BUFFERED_BYTES and not self._transport.is_closing():
            self._transport.resume_reading()
        self._num_buffered = 0
        return data

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow, once it is idle."""
        return self._reusable and self.is_open

    def finish(self) -> bool:
        """Nobody wants more of the answer. Whether another request may follow; else the connection is closed."""
        if self.done and self._reusable and not self._must_not_write and not self._transport.is_closing():
            if self._parts:
                self.take()
            return True
        self.close()
        return False

    def give_up(self) -> None:
        """Have whoever waits, now or next, stop waiting as if it were time."""
        self._is_given_up = True
        self._wake()

    def close(self) -> None:
        """At once: an engine must see that nobody waits, even if it has not read all of the request."""
        self._reusable = False
        self._on_lost = None
        self._transport.abort()

    def _begin(self) -> None:
        self.done = False
        self.status = 0
        self.has_begun = self._ends_by_close = self._is_given_up = False
        self._num_barren = 0

    async def _send_slices(self, head: bytes, body: bytes, due: float | None) -> None:
        """No faster than the peer reads, and letting others have their turn."""
        self._transport.write(head)
        view = memoryview(body)
        for start in range(0, len(body), SLICE_BYTES):
            self._transport.write(view[start : start + SLICE_BYTES])
            await asyncio.sleep(0)
            while self._must_not_write and not self._is_decided:
                await self._wait(due)
            if self._is_decided:  # the peer will not read the rest
                self._reusable = False
                return

    @property
    def _is_decided(self) -> bool:
        """Whether sending more would change nothing."""
        return self.done or self.status >= 400 or self._error is not None

    async def _wait(self, due: float | None) -> None:
        """Until something happens. Raises what keeps the answer from coming."""
        if self._error is not None:
            raise self._error
        if self._is_given_up:
            raise TimeoutError
        waiter, self._due = self._loop.create_future(), due
        self._waiter = waiter
        if due is not None and (self._timer is None or due < self._timer.when()):
            self._look_at(due)
        try:
            await waiter
        finally:
            self._waiter = None

    def _look_at(self, due: float) -> None:
        """See to it that somebody looks by then. A timer stays when what it was set for is over, and is of use to what
        comes next: to set one anew for each answer would cost more than to look in vain now and then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None or self._due is None:
            return
        if self._due > self._loop.time():
            self._look_at(self._due)
        elif not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        was_done = self.done
        if was_done:  # nothing was asked
            return self.close()
        self.has_begun = True
        self.heard_at = self._loop.time()
        num_before = len(self._parts)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(str(error.__context__ or error))
        if self.done:
            return self._wake()
        if len(self._parts) > num_before:
            self._num_barren = 0
            self._hold(sum(map(len, self._parts[num_before:])))
        else:
            self._num_barren += len(data)
            if self._num_barren > MAX_BARREN_BYTES:
                self._fail("too much beside the body")
        if not self._wants_much or self._num_buffered > MAX_BUFFERED_BYTES or self._error is not None:
            self._wake()
        return None

    def eof_received(self) -> None:
        self._peer_closed()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._peer_closed(broken=error is not None)

    def pause_writing(self) -> None:
        self._must_not_write = True

    def resume_writing(self) -> None:
        self._must_not_write = False
        self._wake()

    def _peer_closed(self, *, broken: bool = False) -> None:
        if self._on_lost is not None and self._reusable:
            self._on_lost()
        self._reusable = False
        if self.done:
            return
        if self.status and self._ends_by_close and not broken and self._error is None:
            self.done = True
        elif self._error is None:
            self._error = Disconnected(stale=self._reused and not self.has_begun)
        self._wake()

    def _hold(self, num_bytes: int) -> None:
        """So much more waits for a reader."""
        before = self._num_buffered
        self._num_buffered += num_bytes
        if before <= MAX_BUFFERED_BYTES < self._num_buffered and not self._transport.is_closing():
            self._transport.pause_reading()

    def _fail(self, why: str) -> None:
        self._reusable = False
        if not self.done:  # else the answer was good, and this follows it
            self._error = self._error or ProtocolError(why)
            self.close()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.done:
            raise ValueError("a second answer")
        self._raw_headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._raw_headers += (name, value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 101 or status < 100:
            raise ValueError("a status that nobody asked for")
        if status < 200:
            return
        raw = b"\0".join(self._raw_headers)  # which none of them may hold
        if len(raw) > MAX_BARREN_BYTES:
            raise ValueError("headers too long")
        parts = raw.decode("utf-8", "surrogateescape").split("\0")
        headers = self.headers = CIMultiDictProxy(CIMultiDict(zip(parts[::2], parts[1::2], strict=False)))
        if "Transfer-Encoding" in headers:
            # The parser would take anything else to end with the connection.
            if [coding.lower() for coding in headers.getall("Transfer-Encoding")] != ["chunked"]:
                raise ValueError("a transfer coding that nobody asked for")
        else:
            self._ends_by_close = "Content-Length" not in headers
        self.status = status

    def on_message_complete(self) -> None:
        if self.status:  # else it was interim
            self.done = True
            self._reusable = self._reusable and self._parser.should_keep_alive()
            self._reused = True

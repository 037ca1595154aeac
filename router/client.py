"""The router's HTTP client: requests over connections that are kept for a moment, and nothing done behind one's back.

No redirects, cookies or proxies; no headers besides those given but Host, Content-Length and a URL's user. Time limits
are the caller's, except that of connecting. Whoever stops waiting, cancelled or not, closes the connection.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import ssl
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Final, NamedTuple

from multidict import CIMultiDictProxy
from yarl import URL

from router.client_coding import Decoder, decoder_for
from router.client_protocol import ConnectFailed, Connection, ConnectTimeout, Disconnected, Exhausted, TooLarge

_JSON: Final = "application/json"
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors that say nothing of the server."""
KEEP_ALIVE_SECONDS: Final = 3.0
"""vLLM's server closes idle connections after 5 s; one it is just closing must not be taken for the next request."""


class Origin(NamedTuple):
    host: str
    port: int
    tls: bool


class Target(NamedTuple):
    origin: Origin
    line: str
    """What follows the method, up to and with the Host header."""
    authorization: str
    """The header for a user that the URL names, or nothing."""


class Response:
    """An answer to a request that was sent. To be released in any case: as a context manager it is.

    `due` is when to stop waiting, in event loop time; it raises TimeoutError then.
    """

    def __init__(self, client: Client, origin: Origin, connection: Connection) -> None:
        self.status = 0
        """Known, as the headers are, once something has been waited for."""
        self.headers: CIMultiDictProxy[str]
        self._client = client
        self._origin = origin
        self._connection = connection
        self._is_released = False
        self._decoder: Decoder | None = None
        self._read: list[bytes] = []
        self._num_read = 0

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        given = self.headers.get("Content-Type")
        return given.partition(";")[0].strip().lower() if given else "application/octet-stream"

    @property
    def is_json(self) -> bool:
        return self.headers.get("Content-Type") == _JSON or self.content_type == _JSON

    @property
    def has_begun(self) -> bool:
        """Whether anything of it has come."""
        return self._connection.has_begun

    @property
    def heard_at(self) -> float:
        """When something last came, in event loop time."""
        return self._connection.heard_at

    @property
    def has_ended(self) -> bool:
        """Whether all of it has come, read or not."""
        return self._connection.done

    async def begun(self, due: float | None = None) -> None:
        """Wait for the status and the headers. Raises ClientError."""
        await self._connection.begun(due)
        self._open()

    def take(self) -> bytes:
        """What has come of the body and can be had without waiting; b"" says nothing."""
        assert not self._is_released, "the connection may be another's now"
        return b"" if self._decoder is not None else self._connection.take()

    async def readany(self, due: float | None = None) -> bytes:
        """The next bytes of the body, as soon as there are any; b"" at its end. Raises ClientError."""
        assert not self._is_released, "the connection may be another's now"
        if self._decoder is None:
            return await self._connection.readany(due)
        while not (plain := self._decoder.take()):
            data = await self._connection.readany(due)
            if not data:
                self._decoder.end()
                return b""
            self._decoder.feed(data)
        return plain

    async def read(self, limit: int, due: float | None = None) -> bytes:
        """All of the body that is left. Raises ClientError, TooLarge if it has more than `limit` bytes. One that was
        cancelled can be called again."""
        assert not self._is_released, "the connection may be another's now"
        connection = self._connection
        ended = False
        while not ended:
            part = await connection.readmany(due)
            ended = connection.done
            self._open()
            if self._decoder is None:
                self._keep(part, limit)
                continue
            self._decoder.feed(part)
            while plain := self._decoder.take():
                self._keep(plain, limit)
        if self._decoder is not None:
            self._decoder.end()
        return self._read[0] if len(self._read) == 1 else b"".join(self._read)

    def give_up(self) -> None:
        """Have whoever waits for it stop waiting, as if it were time."""
        if not self._is_released:
            self._connection.give_up()

    def release(self) -> None:
        """Done with it. The connection is kept if all of the answer has come, and else closed at once."""
        if not self._is_released:
            self._is_released = True
            self._client.put_back(self._origin, self._connection)

    def close(self) -> None:
        """Done with it, and with its connection."""
        self._connection.close()
        self.release()

    def _open(self) -> None:
        """Raises ProtocolError if the body comes in a coding that is not known here."""
        if self.status:
            return
        self.status = self._connection.status
        self.headers = self._connection.headers
        if "Content-Encoding" in self.headers:
            self._decoder, self.headers = decoder_for(self.headers)

    def _keep(self, part: bytes, limit: int) -> None:
        if part:
            self._num_read += len(part)
            if self._num_read > limit:
                raise TooLarge(f"more than {limit} bytes")
            self._read.append(part)

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Client:
    def __init__(
        self,
        connect_timeout: float,
        *,
        keepalive_seconds: float = KEEP_ALIVE_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """For the running event loop. `tls`: how to check servers, if not as this machine does by default."""
        self._loop = asyncio.get_running_loop()
        self._connect_timeout = connect_timeout
        self._keepalive_seconds = keepalive_seconds
        self._tls = tls
        self._busy: set[Connection] = set()
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)
        """The longest idle first."""
        self._timer: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[Origin], None] = lambda _: None
        """Called when a server closes a connection that could have been used again: it may have ended."""

    @property
    def num_busy(self) -> int:
        """Connections that carry a request, or an answer not yet released."""
        return len(self._busy)

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, due: float | None = None
    ) -> Response:
        """The answer, begun, whatever its status. Raises ClientError; ValueError for a URL or headers that cannot be
        sent."""
        lines = header_lines(headers.items())
        while True:
            response = await self.send(method, url, lines, body, due)
            try:
                await response.begun(due)
                return response
            except BaseException as error:
                response.close()
                if not (isinstance(error, Disconnected) and error.stale and method == "GET"):
                    raise
                # A GET may be sent twice; a connection just made is never stale, so that this ends.

    async def send(
        self,
        method: str,
        url: str,
        lines: str,
        body: bytes | None = None,
        due: float | None = None,
        *,
        among: set[Response] | None = None,
    ) -> Response:
        """Send a request with these headers, as `header_lines` writes them; nothing of the answer is waited for.
        `among`: where the response goes before anything is sent, for who may want to give it up."""
        target = _target(url)
        head = _head(method, target, lines, body)
        connection = self._kept(target.origin) or await self._connect(target.origin)
        self._busy.add(connection)
        response = Response(self, target.origin, connection)
        if among is not None:
            among.add(response)
        try:
            await connection.send(head, body or b"", due)
        except BaseException:
            if among is not None:
                among.discard(response)
            response.close()
            raise
        return response

    def put_back(self, origin: Origin, connection: Connection) -> None:
        """For responses: this one is done with its connection."""
        self._busy.discard(connection)
        if not connection.finish():
            return
        connection.idle_since = self._loop.time()
        self._idle[origin].append(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(self._keepalive_seconds, self._close_idle)

    async def close(self) -> None:
        """Close everything; answers that are not read to their end break off."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in [*self._busy, *(one for kept in self._idle.values() for one in kept)]:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next round

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _kept(self, origin: Origin) -> Connection | None:
        """The one used last: it is the least likely to be just closed by the server."""
        kept = self._idle.get(origin)
        oldest = self._loop.time() - self._keepalive_seconds
        while kept:
            connection = kept.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    def _close_idle(self) -> None:
        """Close those that were idle for long enough, and come back when the next one will be."""
        oldest = self._loop.time() - self._keepalive_seconds
        kept: defaultdict[Origin, list[Connection]] = defaultdict(list)
        for origin, connections in self._idle.items():
            for connection in connections:
                if connection.idle_since > oldest and connection.is_open:
                    kept[origin].append(connection)
                else:
                    connection.close()
        self._idle = kept
        self._timer = None
        if kept:
            first = min(connections[0].idle_since for connections in kept.values())
            self._timer = self._loop.call_at(first + self._keepalive_seconds, self._close_idle)

    async def _connect(self, origin: Origin) -> Connection:
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop, lambda: self.on_lost(origin)),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError:
            raise ConnectTimeout(f"no connection within {self._connect_timeout} s") from None
        except (OSError, ValueError) as error:  # of names, sockets and TLS
            if isinstance(error, OSError) and error.errno in _OURS:
                raise Exhausted(error.strerror or str(error)) from error
            raise ConnectFailed(str(error)) from error
        return connection


def origin_of(url: str) -> Origin:
    """Raises ValueError for a URL that cannot be asked."""
    return _target(url).origin


@lru_cache(maxsize=8192)
def _target(text: str) -> Target:
    url = URL(text)
    if url.scheme not in ("http", "https") or not url.raw_host or not url.port:
        raise ValueError("not a URL to ask")
    origin = Origin(url.raw_host, url.port, url.scheme == "https")
    line = f"{url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
    if url.user is None:
        return Target(origin, line, "")
    user = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
    return Target(origin, line, f"Authorization: Basic {user}\r\n")


def header_lines(headers: Iterable[tuple[str, str]]) -> str:
    """Headers as they are sent. Raises ValueError for one that would be more than a line."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    text = "".join(lines)
    if not text.count("\r") == text.count("\n") == len(lines) or "\0" in text:
        raise ValueError("a header of more than one line")
    return text


def _head(method: str, target: Target, lines: str, body: bytes | None) -> bytes:
    """Everything before the body. What came in a client's headers and is no text goes out as the bytes it was."""
    length = "" if body is None else f"Content-Length: {len(body)}\r\n"
    user = target.authorization
    if user and "\nauthorization:" in f"\n{lines}".lower():
        user = ""
    return f"{method} {target.line}{lines}{length}{user}\r\n".encode("utf-8", "surrogateescape")

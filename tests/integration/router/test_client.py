"""The router's HTTP client against servers that play every fault."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import inspect
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
from multidict import CIMultiDict

from router.client import Client
from router.client_protocol import (
    SLICE_BYTES,
    ClientError,
    ConnectFailed,
    ConnectTimeout,
    Disconnected,
    ProtocolError,
    TooLarge,
)
from tests.router_harness import NOBODY, until

WITHIN = 1.0
"""In which an engine must see that nobody waits any more."""
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BIG = b"x" * (8 << 20)


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run it on the loop of the router, and on asyncio's own."""

    @functools.wraps(test)
    def run(new_loop: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        async def work() -> None:
            await test(**given)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(work())

    takes = [*inspect.signature(test).parameters.values()]
    takes.append(inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY))
    run.__signature__ = inspect.Signature(takes)  # type: ignore[attr-defined]  # pytest gives what it names
    del run.__wrapped__  # type: ignore[attr-defined]  # else it is taken to be asynchronous
    loops = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("new_loop", loops, ids=["asyncio", "uvloop"])(run)


@dataclass
class Peer:
    """One connection as the server has it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The client has closed it."""

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next one. Raises IncompleteReadError if there is none."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        return head, await self.reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass
        self.gone.set()


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class Server:
    url: str
    peers: list[Peer]


@asynccontextmanager
async def served(
    script: Script, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Server]:
    """A server that plays this on every connection, and then closes it."""
    peers: list[Peer] = []
    tasks: set[asyncio.Task[None]] = set()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        peer = Peer(reader, writer, len(peers))
        peers.append(peer)
        try:
            await script(peer)
        except (asyncio.IncompleteReadError, ConnectionError):
            peer.gone.set()
        except asyncio.CancelledError:
            pass  # the end of the test
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(play, host, 0, ssl=tls)
    name = f"[{host}]" if ":" in host else host
    scheme = "http" if tls is None else "https"
    try:
        yield Server(f"{scheme}://{name}:{server.sockets[0].getsockname()[1]}", peers)
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@asynccontextmanager
async def a_client(connect_timeout: float = 5.0, **settings: Any) -> AsyncIterator[Client]:
    """It must leave nothing busy."""
    async with Client(connect_timeout, **settings) as client:
        yield client
        assert client.num_busy == 0


async def asks(client: Client, url: str, method: str = "GET", body: bytes | None = None) -> bytes:
    with await client.request(method, url, {}, body) as response:
        assert response.status == 200
        return await response.read(1 << 30)


async def answers(peer: Peer) -> None:
    """Every request in full."""
    while True:
        _, body = await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def then(*parts: bytes) -> Script:
    """Take a request, answer with these bytes, and close."""

    async def script(peer: Peer) -> None:
        await peer.request()
        for part in parts:
            await peer.send(part)

    return script


# What is sent, and what comes back.


@on_both_loops
async def test_request_as_it_is_on_the_wire() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            await peer.send(EMPTY)

    async with served(script) as server, a_client() as client:
        host = server.url.removeprefix("http://").encode()
        headers = CIMultiDict([("X-A", "1"), ("X-A", "2"), ("X-B", "gr\udcfcn"), ("X-C", "grün")])
        (await client.request("POST", server.url + "/a%20b?c=d", headers, b"body")).release()
        (await client.request("GET", server.url, {})).release()
        (await client.request("POST", server.url, {}, b"")).release()
    assert seen == [
        (
            b"POST /a%%20b?c=d HTTP/1.1\r\nHost: %s\r\nX-A: 1\r\nX-A: 2\r\nX-B: gr\xfcn\r\nX-C: gr\xc3\xbcn\r\n"
            b"Content-Length: 4\r\n\r\n" % host,
            b"body",
        ),
        (b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host, b""),
        (b"POST / HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\n\r\n" % host, b""),
    ]


@pytest.mark.parametrize("headers", [{"X": "a\r\nY: b"}, {"X": "a\nb"}, {"X": "a\rb"}, {"X": "a\0b"}, {"X\r\nY": "a"}])
@on_both_loops
async def test_header_of_several_lines_is_not_sent(headers: dict[str, str]) -> None:
    async with served(answers) as server, a_client() as client:
        with pytest.raises(ValueError):
            await client.request("GET", server.url, headers)
        assert server.peers == []


@pytest.mark.parametrize("url", ["", "/path", "ftp://host/", "http://", "http://:80/"])
@on_both_loops
async def test_what_is_no_url(url: str) -> None:
    async with a_client() as client:
        with pytest.raises(ValueError):
            await client.request("GET", url, {})


@on_both_loops
async def test_user_of_a_url_is_told_unless_the_request_has_its_own() -> None:
    seen: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            head, _ = await peer.request()
            seen.append(head.lower().partition(b"authorization:")[2].partition(b"\r\n")[0].strip())
            await peer.send(EMPTY)

    async with served(script) as server, a_client() as client:
        url = server.url.replace("http://", "http://aladdin:opensesame@")
        (await client.request("GET", url, {})).release()
        (await client.request("GET", url, {"authorization": "Bearer k"})).release()
    assert seen == [b"basic ywxhzgrpbjpvcgvuc2vzyw1l", b"bearer k"]


@on_both_loops
async def test_headers_of_an_answer() -> None:
    head = EMPTY[:-2] + b"Content-Type: Text/Event-Stream; charset=utf-8\r\nX-A: 1\r\nX-A: 2\r\n\r\n"
    async with served(then(head)) as server, a_client() as client:
        with await client.request("GET", server.url, {}) as response:
            assert response.content_type == "text/event-stream"
            assert response.headers.getall("x-a") == ["1", "2"]
            assert await response.readany() == b""


@on_both_loops
async def test_event_is_there_as_soon_as_it_was_sent() -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        await peer.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with served(script) as server, a_client() as client:
        with await client.request("GET", server.url, {}) as response:
            assert await response.readany() == b"one"
            go_on.set()
            assert await response.readany() == b"two"
            assert await response.readany() == b""


@on_both_loops
async def test_compressed_answer() -> None:
    packed = gzip.compress(BIG)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with served(then(head + packed)) as server, a_client() as client:
        with await client.request("GET", server.url, {}) as response:
            assert "Content-Encoding" not in response.headers
            assert await response.read(len(BIG)) == BIG
        with await client.request("GET", server.url, {}) as response, pytest.raises(TooLarge):
            await response.read(1 << 20)


@on_both_loops
async def test_coding_that_nobody_knows() -> None:
    async with served(then(EMPTY[:-2] + b"Content-Encoding: br\r\n\r\n")) as server, a_client() as client:
        with pytest.raises(ProtocolError):
            await client.request("GET", server.url, {})
        assert client.num_idle == 0


@on_both_loops
async def test_long_body_arrives_whole_and_others_have_their_turn() -> None:
    slow, seen = asyncio.Event(), []

    async def script(peer: Peer) -> None:
        if peer.number == 0:
            await slow.wait()  # until then it reads nothing
        seen.append((await peer.request())[1])
        await peer.send(OK)

    async with served(script) as server, a_client() as client:
        sending = asyncio.create_task(asks(client, server.url, "POST", BIG))
        await until(lambda: server.peers, "it has connected")
        assert await asks(client, server.url) == b"ok"
        slow.set()
        assert await sending == b"ok"
    assert seen == [b"", BIG]


@on_both_loops
async def test_three_hundred_at_once() -> None:
    async with served(answers) as server, a_client(keepalive_seconds=60.0) as client:

        async def one(number: int) -> bool:
            body = b"%d " % number * 1000
            return await asks(client, server.url, "POST", body) == body

        assert all(await asyncio.gather(*(one(number) for number in range(300))))
        assert client.num_idle == len(server.peers) <= 300


# Connections that are kept.


@on_both_loops
async def test_connection_used_last_is_used_next_and_idle_ones_are_closed() -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % peer.number)

    async with served(script) as server, a_client(keepalive_seconds=0.3) as client:
        first, second = [await client.request("GET", server.url, {}) for _ in range(2)]
        first.release()
        second.release()
        assert (len(server.peers), client.num_idle) == (2, 2)
        with await client.request("POST", server.url, {}, b"again") as again:
            assert await again.read(1) == b"1"
            assert client.num_idle == 1
        assert len(server.peers) == 2
        started = time.monotonic()
        await until(lambda: all(peer.gone.is_set() for peer in server.peers), "both are closed", 2.0)
        assert client.num_idle == 0
        assert time.monotonic() - started > 0.1


@on_both_loops
async def test_connection_idle_for_too_long_is_not_used_even_if_it_was_not_closed_yet() -> None:
    async with served(answers) as server, a_client(keepalive_seconds=0.01) as client:
        await asks(client, server.url)
        time.sleep(0.02)  # noqa: ASYNC251  # the loop has no time to close it
        await asks(client, server.url)
        assert len(server.peers) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more",
    ],
)
@on_both_loops
async def test_connection_that_may_not_be_kept(answer: bytes) -> None:
    async def script(peer: Peer) -> None:
        await then(answer)(peer)
        await peer.closed()

    async with served(script) as server, a_client() as client:
        assert await asks(client, server.url) == b"ok"
        assert client.num_idle == 0
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)
        assert await asks(client, server.url) == b"ok"
        assert len(server.peers) == 2


@on_both_loops
async def test_server_that_closes_when_idle_is_asked_on_a_new_connection() -> None:
    async with served(then(OK)) as server, a_client() as client:
        for number in range(3):
            assert await asks(client, server.url, "POST", b"x") == b"ok"
            await until(lambda: not any(map(_is_usable, client._idle.values())), "the end has been seen")
            assert len(server.peers) == number + 1


def _is_usable(kept: list[Any]) -> bool:
    return any(connection.is_open for connection in kept)


@on_both_loops
async def test_server_that_closes_as_we_send() -> None:
    """A GET is sent again on a new connection; a POST may have been taken."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()

    async with served(script) as server, a_client() as client:
        await asks(client, server.url)
        with pytest.raises(Disconnected) as caught:
            await asks(client, server.url, "POST", b"x")
        assert caught.value.stale
        assert len(server.peers) == 1
        await asks(client, server.url)
        await asks(client, server.url)
        assert len(server.peers) == 3


@on_both_loops
async def test_answer_left_unread_closes_its_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nok")
        await peer.closed()

    async with served(script) as server, a_client() as client:
        response = await client.request("GET", server.url, {})
        assert await response.readany() == b"ok"
        assert client.num_busy == 1
        response.release()
        response.release()
        assert (client.num_busy, client.num_idle) == (0, 0)
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)


@on_both_loops
async def test_client_that_is_closed_closes_everything() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK if peer.number == 0 else b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok")
        await peer.closed()

    async with served(script) as server:
        async with Client(1.0) as client:
            idle, busy = [await client.request("GET", server.url, {}) for _ in range(2)]
            idle.release()
        await until(lambda: all(peer.gone.is_set() for peer in server.peers), "both are closed", WITHIN)
        with pytest.raises(ClientError):
            await busy.read(100)
        busy.release()


# Servers that break off.


@pytest.mark.parametrize(
    "parts", [(), (b"HTTP/1.1 2",), (b"HTTP/1.1 200 OK\r\nContent-Le",), (b"HTTP/1.1 100 Continue\r\n\r\n",)]
)
@on_both_loops
async def test_broken_off_before_the_answer_has_begun(parts: tuple[bytes, ...]) -> None:
    async with served(then(*parts)) as server, a_client() as client:
        with pytest.raises(Disconnected) as caught:
            await client.request("POST", server.url, {}, b"x")
        assert not caught.value.stale


@on_both_loops
async def test_broken_off_in_the_middle() -> None:
    """What had come is still to be had."""
    async with served(then(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", b"half")) as server, a_client() as client:
        with await client.request("GET", server.url, {}) as response:
            assert await response.readany() == b"half"
            with pytest.raises(Disconnected) as caught:
                await response.readany()
            assert not caught.value.stale


@pytest.mark.parametrize("method", ["GET", "POST"])
@on_both_loops
async def test_half_closed_before_an_answer(method: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write_eof()
        await peer.closed()

    async with served(script) as server, a_client() as client:
        with pytest.raises(Disconnected):
            await client.request(method, server.url, {})
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)


@on_both_loops
async def test_answer_that_ends_with_its_connection() -> None:
    async with served(then(b"HTTP/1.1 200 OK\r\n\r\nab", b"cd")) as server, a_client() as client:
        assert await asks(client, server.url) == b"abcd"
        assert client.num_idle == 0


@on_both_loops
async def test_reset_is_no_end_of_an_answer() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nab")
        await got.wait()
        peer.writer.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER of 0 s: RST, not FIN
        peer.writer.transport.abort()

    got = asyncio.Event()
    async with served(script) as server, a_client() as client:
        with await client.request("GET", server.url, {}) as response:
            assert await response.readany() == b"ab"
            got.set()
            with pytest.raises(Disconnected):
                await response.readany()


@pytest.mark.parametrize("and_closes", [True, False])
@on_both_loops
async def test_refused_while_the_body_is_still_being_sent(and_closes: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\n")
        if not and_closes:
            await seen.wait()
        await peer.send(b"big")
        if not and_closes:
            await peer.gone.wait()

    seen = asyncio.Event()

    async with served(script) as server, a_client() as client:
        with await asyncio.wait_for(client.request("POST", server.url, {}, BIG * 4), 5) as response:
            seen.set()
            assert (response.status, await response.read(10)) == (413, b"big")
        assert client.num_idle == 0, "half a request is in it"


@on_both_loops
async def test_broken_off_while_the_body_is_still_being_sent() -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")

    async with served(script) as server, a_client() as client:
        with pytest.raises(Disconnected):
            await asyncio.wait_for(client.request("POST", server.url, {}, BIG * 4), 5)


@on_both_loops
async def test_no_answer_at_all() -> None:
    async with served(then(b"SSH-2.0-OpenSSH_9\r\n")) as server, a_client() as client:
        with pytest.raises(ProtocolError):
            await client.request("GET", server.url, {})


# Nobody waits any more.


async def stalls(peer: Peer) -> None:
    await peer.request()
    await peer.closed()


async def stalls_in_the_body(peer: Peer) -> None:
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nok")
    await peer.closed()


@pytest.mark.parametrize("script", [stalls, stalls_in_the_body])
@pytest.mark.parametrize("how", ["cancelled", "timeout"])
@on_both_loops
async def test_server_hears_at_once_that_nobody_waits(script: Script, how: str) -> None:
    async with served(script) as server, a_client() as client:
        asking = asyncio.create_task(asks(client, server.url, "POST", b"x"))
        await until(lambda: client.num_busy, "it has been sent")
        if how == "cancelled":
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asking
        assert (client.num_busy, client.num_idle) == (0, 0)
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)


@on_both_loops
async def test_server_hears_at_once_even_if_it_reads_nothing() -> None:
    """What is written but not yet read by it must not hold the connection open."""
    cancelled = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await cancelled.wait()
        await peer.closed()

    async with served(script) as server, a_client() as client:
        asking = asyncio.create_task(client.request("POST", server.url, {}, BIG * 4))
        await until(lambda: any(one._must_not_write for one in client._busy), "it is being sent")
        for _ in range(100):
            await asyncio.sleep(0)
        (busy,) = client._busy
        assert busy._transport.get_write_buffer_size() <= 2 * SLICE_BYTES, "the rest waits for the server"
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert client.num_busy == 0
        cancelled.set()
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)


@on_both_loops
async def test_cancelled_as_the_answer_comes() -> None:
    """Nothing is lost either way: there is an answer, or the connection is closed."""
    async with served(answers) as server, a_client() as client:
        for delay in range(40):
            asking = asyncio.create_task(asks(client, server.url, "POST", b"x"))
            for _ in range(delay):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            assert client.num_busy == 0
        await until(lambda: sum(not peer.gone.is_set() for peer in server.peers) == client.num_idle, "none is lost")


# No connection.


@on_both_loops
async def test_nobody_listens() -> None:
    async with a_client() as client:
        with pytest.raises(ConnectFailed) as caught:
            await client.request("GET", NOBODY, {})
        assert not isinstance(caught.value, ConnectTimeout)


@pytest.mark.parametrize("host", ["nobody.invalid", "a" * 64 + ".example"])
@on_both_loops
async def test_no_such_name(host: str) -> None:
    async with a_client() as client:
        with pytest.raises(ConnectFailed):
            await client.request("GET", f"http://{host}:1/", {})


async def says_nothing(peer: Peer) -> None:
    await peer.closed()


@on_both_loops
async def test_no_connection_within_the_time() -> None:
    """A handshake that goes nowhere is one as well."""
    async with served(says_nothing) as server, a_client(connect_timeout=0.1) as client:
        with pytest.raises(ConnectTimeout):
            await client.request("GET", server.url.replace("http:", "https:"), {})
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)


@on_both_loops
async def test_cancelled_while_connecting() -> None:
    async with served(says_nothing) as server, a_client() as client:
        asking = asyncio.create_task(client.request("GET", server.url.replace("http:", "https:"), {}))
        await until(lambda: server.peers, "it connects")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)


@on_both_loops
async def test_ipv6() -> None:
    try:
        async with served(answers, host="::1") as server, a_client() as client:
            assert await asks(client, server.url, "POST", b"six") == b"six"
    except OSError:
        pytest.skip("no IPv6 here")


# TLS.


@dataclass
class Contexts:
    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    folder: Path = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        command = ["openssl", "req", "-x509", *made, *named, "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl here to make a certificate")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return Contexts(server, ssl.create_default_context(cafile=str(certificate)))


@on_both_loops
async def test_tls(tls: Contexts) -> None:
    async with served(answers, tls=tls.server) as server, a_client(tls=tls.client) as client:
        assert await asks(client, server.url, "POST", BIG) == BIG
        assert await asks(client, server.url, "POST", b"again") == b"again"
        assert len(server.peers) == 1


@on_both_loops
async def test_tls_peer_hears_at_once_that_nobody_waits(tls: Contexts) -> None:
    async with served(stalls, tls=tls.server) as server, a_client(tls=tls.client) as client:
        asking = asyncio.create_task(asks(client, server.url))
        await until(lambda: client.num_busy, "it has been sent")
        asking.cancel()
        await asyncio.wait([asking])
        await until(server.peers[0].gone.is_set, "it is closed", WITHIN)


@on_both_loops
async def test_tls_with_a_certificate_that_nobody_knows(tls: Contexts) -> None:
    async with served(answers, tls=tls.server) as server, a_client() as client:
        with pytest.raises(ConnectFailed):
            await client.request("GET", server.url, {})


@on_both_loops
async def test_tls_where_there_is_none() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(b"SSH-2.0-OpenSSH_9\r\n")
        await peer.closed()

    async with served(script) as server, a_client() as client:
        with pytest.raises(ConnectFailed):
            await client.request("GET", server.url.replace("http:", "https:"), {})


# Memory.


@on_both_loops
async def test_answer_that_nobody_reads_stays_with_the_server() -> None:
    num_sent = 0

    async def script(peer: Peer) -> None:
        nonlocal num_sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while num_sent < 1 << 30:
            await peer.send(b"x" * (1 << 20))
            num_sent += 1 << 20

    async with served(script) as server, a_client() as client:
        with await client.request("GET", server.url, {}) as response:
            for _ in range(2000):
                await asyncio.sleep(0)
            assert num_sent < 32 << 20, "what the sockets hold"
            assert len(await response.readany()) <= 1 << 20
            size = 0
            while size < 64 << 20:
                size += len(await response.readany())

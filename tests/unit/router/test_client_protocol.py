"""One connection of the router's client: answers however they are cut, and what is no answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.client_protocol import (
    MAX_BARREN_BYTES,
    MAX_BUFFERED_BYTES,
    ClientError,
    Connection,
    Disconnected,
    ProtocolError,
)

OK = b"HTTP/1.1 200 OK\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written, and says what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_paused = False
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


@dataclass
class Asked:
    """A connection with a request on it, and what has been had of the answer."""

    connection: Connection
    transport: Transport
    request: Any
    body: bytearray = field(default_factory=bytearray)
    error: ClientError | None = None

    def feed(self, parts: Sequence[bytes], *, eof: bool = False) -> Asked:
        for part in parts:
            if not self.transport.aborted:
                self.connection.data_received(part)
                self.body += self.connection.take()
        if eof and not self.transport.aborted:
            self.connection.eof_received()
        if self.transport.aborted or eof:
            self.connection.connection_lost(None)
        self.body += self.connection.take()
        try:
            if self.connection.done:
                assert at_once(self.connection.readany()) == b""
            elif self.transport.aborted or eof:
                at_once(self.connection.readany())
        except ClientError as error:
            self.error = error
        return self

    def end(self) -> None:
        self.request.close()


def at_once(work: Awaitable[bytes]) -> bytes:
    """The result of a coroutine that need not wait."""
    try:
        next(work.__await__())
    except StopIteration as result:
        return bytes(result.value)
    raise AssertionError("it waits")


class Loop:
    """All that a connection wants of its loop."""

    def create_future(self) -> Any:
        return Waiter()

    def time(self) -> float:
        return 0.0


class Waiter:
    def __await__(self) -> Iterator[None]:
        yield

    def done(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        pass


async def exchange(connection: Connection) -> None:
    await connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    await connection.begun()


def asked(connection: Connection | None = None, transport: Transport | None = None) -> Asked:
    if connection is None or transport is None:
        connection, transport = Connection(Loop()), Transport()  # type: ignore[arg-type]
        connection.connection_made(transport)
    request = exchange(connection)
    request.send(None)
    return Asked(connection, transport, request)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    places = [0, *sorted({place for place in places if place < len(data)}), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(places) if start < stop]


def chunked(*chunks: bytes, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    parts = [b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks if chunk]
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


@dataclass(frozen=True)
class Legal:
    data: bytes
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    eof: bool = False
    reusable: bool = True


@st.composite
def legal_answers(draw: st.DrawFn) -> Legal:
    status = draw(st.sampled_from([200, 200, 204, 304, 400, 404, 500, 503, 999]))
    headers = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["X-A", "x-b", "Content-Type", "Set-Cookie", "Retry-After"]),
                st.sampled_from(["", "1", "text/event-stream; charset=utf-8", "a, b", "grün", "\udce9"]),
            ),
            max_size=5,
        )
    )
    chunks = draw(st.lists(st.binary(max_size=40), max_size=5))
    body = b"".join(chunks)
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    close = draw(st.booleans())
    if status in (204, 304):
        framing, body, wire = "none", b"", b""
    elif framing == "length":
        headers.append(("Content-Length", str(len(body))))
        wire = body
    elif framing == "chunked":
        headers.append((draw(st.sampled_from(["Transfer-Encoding", "transfer-encoding"])), "chunked"))
        trailers = draw(st.sampled_from([b"", b"X-T: 1\r\n", b"X-T: 1\r\nX-U:\r\n"]))
        wire = chunked(*chunks, extension=draw(st.sampled_from([b"", b";a=b"])), trailers=trailers)
    else:
        wire = body
    if close:
        headers.append(("Connection", "close"))
    interim = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" * 2])
    )
    lines = [f"{name}: {value}\r\n".encode("utf-8", "surrogateescape") for name, value in headers]
    reason = draw(st.sampled_from([b" OK", b"", b" Not here"]))
    data = interim + b"HTTP/1.1 %d%s\r\n" % (status, reason) + b"".join(lines) + b"\r\n" + wire
    return Legal(data, status, headers, body, framing == "close", not close and framing != "close")


def check(answer: Legal, places: Sequence[int]) -> None:
    one = asked().feed(cut(answer.data, places), eof=answer.eof)
    assert one.error is None
    assert one.connection.status == answer.status
    assert list(one.connection.headers.items()) == answer.headers
    assert bytes(one.body) == answer.body
    assert one.connection.done
    assert one.connection.finish() == answer.reusable
    assert one.transport.aborted == (not answer.reusable)
    one.end()


@given(answer=legal_answers(), places=st.lists(st.integers(1, 400), max_size=12))
def test_answer_is_the_same_however_it_is_cut(answer: Legal, places: list[int]) -> None:
    check(answer, places)


@given(answer=legal_answers())
def test_answer_is_the_same_byte_by_byte(answer: Legal) -> None:
    check(answer, range(len(answer.data)))


@given(answers=st.lists(legal_answers().filter(lambda one: one.reusable), min_size=2, max_size=4))
def test_answers_that_follow_one_another_do_not_mix(answers: list[Legal]) -> None:
    one = asked()
    for answer in answers:
        one = asked(one.connection, one.transport).feed(cut(answer.data, [7, 30, len(answer.data) - 1]))
        assert (one.connection.status, bytes(one.body), one.error) == (answer.status, answer.body, None)
        assert one.connection.finish()


NO_ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH_9\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "status that is no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "switched protocols": b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    "switched without a word": b"HTTP/1.1 101 X\r\n\r\n",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "list of lengths": OK + b"Content-Length: 2, 3\r\n\r\nabc",
    "length and chunks": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "negative length": OK + b"Content-Length: -1\r\n\r\n",
    "length with a sign": OK + b"Content-Length: +1\r\n\r\na",
    "length that is too long": OK + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "other transfer coding": OK + b"Transfer-Encoding: gzip\r\n\r\n",
    "chunks in another coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size that is no number": OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "negative chunk size": OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\nab\r\n0\r\n\r\n",
    "chunk longer than it says": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
    "header without a colon": OK + b"Content-Length\r\n\r\n",
    "folded header": OK + b"X: a\r\n b\r\n\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "line feed in a header": OK + b"X: a\nY: b\r\n\r\n",
    "zero in a header": OK + b"X: a\0b\r\n\r\n",
    "length in a trailer": OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\r\n",
    "broken trailer": OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX\r\n\r\n",
}


@pytest.mark.parametrize("data", NO_ANSWERS.values(), ids=NO_ANSWERS)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_is_no_answer(data: bytes, step: int) -> None:
    one = asked().feed(cut(data, range(0, len(data), step)))
    assert isinstance(one.error, ProtocolError)
    assert not one.connection.finish()
    assert one.transport.aborted
    one.end()


SURPLUS = {
    "garbage": OK + b"Content-Length: 2\r\n\r\nabgarbage",
    "the next answer": OK + b"Content-Length: 2\r\n\r\nab" + OK + b"Content-Length: 1\r\n\r\nx",
    "half of the next answer": OK + b"Content-Length: 2\r\n\r\nabHT",
    "after chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\nH",
    "after the last": OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nabH",
}


@pytest.mark.parametrize("data", SURPLUS.values(), ids=SURPLUS)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_follows_an_answer_is_nobodys(data: bytes, step: int) -> None:
    """The answer is good, and the connection is not used again."""
    one = asked().feed(cut(data, range(0, len(data), step)))
    assert (bytes(one.body), one.error) == (b"ab", None)
    assert not one.connection.finish()
    assert one.transport.aborted


def test_what_comes_unasked_closes_the_connection() -> None:
    one = asked().feed([OK + b"Content-Length: 0\r\n\r\n"])
    assert one.connection.finish()
    one.connection.data_received(OK)
    assert one.transport.aborted
    assert not one.connection.finish()


ENDLESS = {
    "headers": (OK, b"X-A: 0123456789\r\n"),
    "one header": (OK + b"X-A: ", b"0123456789"),
    "interim answers": (b"", b"HTTP/1.1 102 Wait\r\n\r\n"),
    "empty lines": (b"", b"\r\n"),
    "chunk extension": (OK + b"Transfer-Encoding: chunked\r\n\r\n2;", b"abcdefgh"),
    "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n", b"X-A: 0123456789\r\n"),
    "one trailer": (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-A: ", b"0123456789"),
}


@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("step", [1, 1000])
def test_what_never_comes_to_the_body_has_a_bound(begin: bytes, more: bytes, step: int) -> None:
    one = asked().feed([begin] if begin else [])
    num_fed = 0
    while not one.transport.aborted:
        one.feed([more * step])
        num_fed += len(more) * step
        assert num_fed <= MAX_BARREN_BYTES + len(more) * step
    assert isinstance(one.error, ProtocolError)
    one.end()


def test_headers_are_too_long_even_in_one_piece() -> None:
    one = asked().feed([OK + b"X: %s\r\nContent-Length: 0\r\n\r\n" % (b"a" * (MAX_BARREN_BYTES + 1))])
    assert isinstance(one.error, ProtocolError)
    one.end()


def test_small_chunks_of_a_long_stream_are_no_trouble() -> None:
    one = asked().feed([OK + b"Transfer-Encoding: chunked\r\n\r\n"])
    one.feed([b"1;%s\r\na\r\n" % (b"x" * 1000)] * 1000)
    assert (len(one.body), one.error) == (1000, None)
    one.end()


def test_peer_waits_while_nobody_reads() -> None:
    one = asked().feed([OK + b"Content-Length: 100000000\r\n\r\n"])
    half = b"x" * (MAX_BUFFERED_BYTES // 2)
    one.connection.data_received(half)
    one.connection.data_received(half)
    assert not one.transport.is_paused
    one.connection.data_received(b"x")
    assert one.transport.is_paused
    assert len(at_once(one.connection.readany())) == MAX_BUFFERED_BYTES + 1
    assert not one.transport.is_paused
    one.connection.data_received(half)
    assert not one.transport.is_paused, "what was read no longer counts"
    one.end()


def test_what_is_left_unread_of_a_complete_answer_does_not_stop_the_next() -> None:
    one = asked()
    size = 2 * MAX_BUFFERED_BYTES
    one.connection.data_received(OK + b"Content-Length: %d\r\n\r\n%s" % (size, b"x" * (size - 1)))
    assert one.transport.is_paused
    one.connection.data_received(b"x")
    assert one.connection.finish()
    assert not one.transport.is_paused
    again = asked(one.connection, one.transport).feed([OK + b"Content-Length: 2\r\n\r\nab"])
    assert bytes(again.body) == b"ab"


@pytest.mark.parametrize(
    "data",
    [
        b"HTT",
        OK,
        OK + b"Content-Length: 3\r\n\r\n",
        OK + b"Content-Length: 3\r\n\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_peer_that_closes_before_the_end(data: bytes) -> None:
    one = asked().feed([data], eof=True)
    assert isinstance(one.error, Disconnected)
    assert not one.error.stale, "something of the answer had come"
    assert not one.connection.finish()
    one.end()


@pytest.mark.parametrize("data", [b"H", OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"])
def test_peer_that_closes_before_the_end_of_a_later_answer(data: bytes) -> None:
    first = asked().feed([b"HTTP/1.1 204 No Content\r\n\r\n"])
    again = asked(first.connection, first.transport).feed([data], eof=True)
    assert isinstance(again.error, Disconnected)
    assert not again.error.stale
    again.end()


def test_peer_that_closes_without_a_word() -> None:
    one = asked().feed([], eof=True)
    assert isinstance(one.error, Disconnected)
    assert not one.error.stale, "the connection was new"
    one.end()
    good = asked().feed([OK + b"Content-Length: 0\r\n\r\n"])
    again = asked(good.connection, good.transport).feed([], eof=True)
    assert isinstance(again.error, Disconnected)
    assert again.error.stale
    again.end()


def test_broken_connection_is_no_end_of_an_answer() -> None:
    one = asked().feed([OK + b"\r\nabc"])
    one.connection.connection_lost(ConnectionResetError())
    with pytest.raises(Disconnected):
        at_once(one.connection.readany())
    one.end()


async def test_connection_lost_before_it_was_used() -> None:
    connection = Connection(asyncio.get_running_loop())
    connection.connection_made(Transport())
    connection.connection_lost(None)
    with pytest.raises(Disconnected):
        await exchange(connection)


class Timer:
    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self._when, self.call, self.is_cancelled = when, call, False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.is_cancelled = True


class Timed:
    """The running loop, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.create_future = asyncio.get_running_loop().create_future

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, call))
        return self.timers[-1]

    def turn_to(self, now: float) -> None:
        self.now = now
        for timer in [one for one in self.timers if one.when() <= now and not one.is_cancelled]:
            self.timers.remove(timer)
            timer.call()


@asynccontextmanager
async def waiting(connection: Connection, due: float) -> AsyncIterator[asyncio.Task[None]]:
    """For an answer to a request."""
    await connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    task = asyncio.create_task(connection.begun(due))
    await asyncio.sleep(0)
    yield task
    await asyncio.wait([task])


def timed() -> tuple[Timed, Connection]:
    loop = Timed()
    connection = Connection(loop)  # type: ignore[arg-type]
    connection.connection_made(Transport())
    return loop, connection


async def test_timer_of_an_answer_serves_the_next() -> None:
    loop, connection = timed()
    for due in (10.0, 11.0, 12.0):
        async with waiting(connection, due) as answer:
            connection.data_received(OK + b"Content-Length: 0\r\n\r\n")
        assert answer.exception() is None
    assert [timer.when() for timer in loop.timers] == [10.0]
    async with waiting(connection, 20.0) as answer:
        loop.turn_to(10.0)
        await asyncio.sleep(0)
        assert not answer.done(), "it has time until 20"
        loop.turn_to(20.0)
    assert isinstance(answer.exception(), TimeoutError)


async def test_time_is_over_before_that_of_the_last_answer() -> None:
    loop, connection = timed()
    async with waiting(connection, 100.0):
        connection.data_received(OK + b"Content-Length: 0\r\n\r\n")
    async with waiting(connection, 1.0) as answer:
        loop.turn_to(1.0)
    assert isinstance(answer.exception(), TimeoutError)


async def test_no_timer_is_left_of_a_connection_that_is_gone() -> None:
    loop, connection = timed()
    async with waiting(connection, 100.0) as answer:
        connection.connection_lost(None)
    assert isinstance(answer.exception(), Disconnected)
    assert all(timer.is_cancelled for timer in loop.timers)

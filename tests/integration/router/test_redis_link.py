"""Commands whose callers leave at any moment, over one connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from router.redis_address import RedisAddress
from router.redis_connection import connect
from router.redis_link import LATE_SECONDS, Link
from tests.redis_stub import serving
from tests.store_parts import eventually


def link_to(url: str, *, timeout: float) -> Link:
    address = RedisAddress.parse(url)
    return Link(partial(connect, address.data, address.endpoints[0]), timeout=timeout)


@pytest.fixture
async def link(redis_url: str) -> AsyncIterator[Link]:
    link = link_to(redis_url + "?client_name=one-link", timeout=20.0)
    yield link
    await link.close()
    assert link.num_pending == 0


async def ask(link: Link, *command: str | bytes | int) -> Any:
    return await link.send(*command).future


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """The URL of a server that gives each connection one answer."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if await reader.read(1 << 16):
            writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        for writer in writers:
            writer.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("seed", range(3))
async def test_reply_is_that_of_the_command(link: Link, redis_url: str, seed: int) -> None:
    """Two hundred callers leave, while others go on."""
    rng = random.Random(seed)

    async def echo(number: int) -> None:
        text = str(number).encode() * rng.choice((1, 20_000))
        assert await ask(link, "ECHO", text) == text

    async def load() -> None:
        for number in range(100):
            await echo(number)

    others = [asyncio.create_task(load()) for _ in range(3)]
    for number in range(1000, 1200):
        task = asyncio.create_task(echo(number))
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
    await asyncio.gather(*others)
    assert await ask(link, "PING") == b"PONG"
    async with Redis.from_url(redis_url) as redis:
        assert sum(client["name"] == "one-link" for client in await redis.client_list()) == 1


async def test_what_is_not_written_yet_ends_with_its_connection(link: Link) -> None:
    assert await ask(link, "PING") == b"PONG"
    sent = [link.send("ECHO", text) for text in "abc"]
    assert link._line is not None
    link._line.connection_lost(None)
    for command in sent:
        assert isinstance(await command.future, RedisConnectionError)
    await eventually(partial(_answers, link))


async def _answers(link: Link) -> bool:
    return bool(await ask(link, "PING") == b"PONG")


async def test_error_reply_leaves_the_connection_as_good_as_before(link: Link) -> None:
    first = await ask(link, "CLIENT", "ID")
    for _ in range(3):
        assert isinstance(await ask(link, "NONSENSE"), ResponseError)
    assert await ask(link, "CLIENT", "ID") == first


async def test_late_reply_goes_to_who_is_left(redis_url: str) -> None:
    """Once, with whether the caller was cancelled or told that it is over."""
    link = link_to(redis_url, timeout=0.05)
    told: list[tuple[Any, bool]] = []

    def late(reply: Any, cancelled: bool) -> None:
        told.append((reply, cancelled))

    async with Redis.from_url(redis_url) as redis:
        await ask(link, "PING")
        blocked = link.send("BLPOP", "late-list", 0, late=late)
        left = link.send("ECHO", b"left", late=late)
        answered = link.send("ECHO", b"answered", late=late)
        left.future.cancel()
        assert isinstance(await blocked.future, TimeoutError)
        assert isinstance(await answered.future, TimeoutError)
        assert link.num_pending == 3
        await redis.rpush("late-list", "x")

        async def settled() -> bool:
            return link.num_pending == 0

        await eventually(settled)
    assert told == [([b"late-list", b"x"], False), (b"left", True), (b"answered", False)]
    assert await ask(link, "ECHO", b"in time") == b"in time"
    assert len(told) == 3
    await link.close()


async def test_connection_without_reply_is_given_up(redis_url: str) -> None:
    """Everything under way is told, and the next command has another connection."""
    link = link_to(redis_url, timeout=0.05)
    told: list[Any] = []
    first = await ask(link, "CLIENT", "ID")
    blocked = link.send("BLPOP", "nothing-there", 0, late=lambda reply, _: told.append(reply))
    assert isinstance(await blocked.future, TimeoutError)

    async def given_up() -> bool:
        return link.num_pending == 0

    await eventually(given_up, 10 * LATE_SECONDS)
    assert [type(reply) for reply in told] == [RedisConnectionError]
    assert await ask(link, "CLIENT", "ID") != first
    await link.close()


@pytest.mark.parametrize("more", [b":99\r\n", b"+o", b"\r\n"])
async def test_connection_on_which_more_is_said_is_not_used_again(more: bytes) -> None:
    """What was not asked for is never taken for the reply to the next command."""
    async with answering(b":1\r\n" + more) as url:
        link = link_to(url, timeout=20.0)

        async def answered() -> bool:
            reply = await ask(link, "PING")
            assert reply == 1 or isinstance(reply, RedisConnectionError)
            return bool(reply == 1)

        for _ in range(3):
            await eventually(answered)
        await link.close()


async def test_commands_before_the_connection_is_made_go_out_in_order(link: Link) -> None:
    commands = [link.send("ECHO", str(number)) for number in range(20)]
    assert not link.is_connected
    assert [await command.future for command in commands] == [str(number).encode() for number in range(20)]


async def test_server_that_keeps_hanging_up_is_left_alone_for_longer_and_longer() -> None:
    """Commands in between are told at once, instead of each making a connection."""
    num_connections = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()

    async with serving(hang_up) as url:
        link = link_to(url, timeout=20.0)
        loop = asyncio.get_running_loop()
        ends = loop.time() + 1.0
        num_commands = 0
        while loop.time() < ends:
            assert isinstance(await ask(link, "PING"), RedisConnectionError)
            num_commands += 1
            await asyncio.sleep(0)
        await link.close()
    assert num_commands > 10 * num_connections
    assert 3 <= num_connections <= 8

"""Connections whose commands are broken off anywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from router.connections import Connections
from tests.store_parts import eventually


@pytest.fixture
async def connections(redis_url: str) -> AsyncIterator[Connections]:
    connections = Connections(redis_url + "?client_name=broken-off", limit=2, patience=5.0)
    yield connections
    await connections.close()
    assert connections.num_lent == connections.num_idle == 0


@pytest.mark.parametrize("seed", range(3))
async def test_reply_is_that_of_the_command(connections: Connections, redis_url: str, seed: int) -> None:
    """Two hundred of them cancelled, some twice, while others go on."""
    rng = random.Random(seed)

    async def echo(number: int) -> None:
        text = str(number).encode() * rng.choice((1, 20_000))
        assert await connections.execute("ECHO", text) == text

    async def load() -> None:
        for number in range(100):
            await echo(number)

    others = [asyncio.create_task(load()) for _ in range(3)]
    for number in range(1000, 1200):
        task = asyncio.create_task(echo(number))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.003)
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
    await asyncio.gather(*others)
    assert connections.num_lent == 0
    assert connections.num_idle <= 2
    await asyncio.gather(echo(1), echo(2), echo(3))
    async with Redis.from_url(redis_url) as redis:

        async def closed() -> bool:
            return sum(client["name"] == "broken-off" for client in await redis.client_list()) <= 2

        await eventually(closed)


async def test_error_reply_leaves_the_connection_as_good_as_before(connections: Connections) -> None:
    first = await connections.execute("CLIENT", "ID")
    for _ in range(3):
        with pytest.raises(ResponseError):
            await connections.execute("NONSENSE")
    assert await connections.execute("CLIENT", "ID") == first


async def test_nobody_waits_for_a_connection_for_ever(redis_url: str) -> None:
    connections = Connections(redis_url, limit=1, patience=0.05)
    blocked = asyncio.create_task(connections.execute("BLPOP", "nothing-there", 0))
    await asyncio.sleep(0)
    assert connections.num_lent == 1
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await connections.execute("PING")
    blocked.cancel()
    await asyncio.wait([blocked])
    assert await connections.execute("PING") == b"PONG"
    await connections.close()

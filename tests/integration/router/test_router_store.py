"""Redis is a cache: whatever it does, the client gets its answer, a little later at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.store import FAULTS_UNTIL_PAUSE
from tests.router_harness import CHAT, router_over
from tests.stub_engine import StubEngine
from tests.valkey import Valkey, free_port, valkey

TIMEOUT = 0.1
MARGIN = 1.0
EXPLAIN = {"X-Backhaul-Explain": "1"}


Breakage = Callable[[Valkey], Awaitable[None]]


async def kill(server: Valkey) -> None:
    server.kill()


async def pause(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("CLIENT", "PAUSE", "30000", "ALL")


async def fill(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("CONFIG", "SET", "maxmemory", "1")


async def lock(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("CONFIG", "SET", "requirepass", "secret")
        await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def demote(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("REPLICAOF", "127.0.0.1", "1")


@pytest.mark.parametrize(
    ("breakage", "stream"), [(kill, True), (kill, False), (pause, True), (fill, False), (lock, True), (demote, False)]
)
async def test_turns_go_on_whatever_breaks(
    p: StubEngine, d: StubEngine, tmp_path: Path, breakage: Breakage, stream: bool
) -> None:
    body = {**CHAT, "stream": stream, "conversation_id": "x"}
    with valkey(tmp_path) as server:
        async with router_over([p], [d], server.url, redis_timeout=TIMEOUT) as front:
            deadline = time.monotonic() + 10
            while (await front.post(body, headers=EXPLAIN)).explain["turn"] == 1:
                assert time.monotonic() < deadline
            served = await front.metric("backhaul_router_turns_total", outcome="ok")
            await breakage(server)
            for _ in range(FAULTS_UNTIL_PAUSE + 2):
                started = time.monotonic()
                answer = await front.post(body, headers=EXPLAIN)
                assert answer.status == 200
                assert time.monotonic() - started < 2 * TIMEOUT + MARGIN
            assert await front.metric("backhaul_router_turns_total", outcome="ok") == served + FAULTS_UNTIL_PAUSE + 2


async def test_state_works_again_when_redis_does(p: StubEngine, d: StubEngine, tmp_path: Path) -> None:
    port = free_port()
    body = {**CHAT, "conversation_id": "x"}

    async def turn() -> int:
        return int((await front.post(body, headers=EXPLAIN)).explain["turn"])

    async with router_over([p], [d], f"redis://127.0.0.1:{port}/0", redis_timeout=1.0) as front:
        assert [await turn(), await turn(), await turn()] == [1, 1, 1]
        assert await front.metric("backhaul_router_store_operations_total", result="skipped") > 0
        with valkey(tmp_path, port):
            deadline = time.monotonic() + 5
            while await turn() == 1:
                assert time.monotonic() < deadline
            assert await turn() > 2


@pytest.mark.parametrize(
    "answer",
    [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\xff" * 100, b"$-5\r\n", b"*9\r\n", b"$2000000000\r\n"],
)
async def test_port_of_something_else(p: StubEngine, d: StubEngine, answer: bytes | None) -> None:
    """None: accepts and says nothing. Empty: closes at once."""
    clients: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(writer)
        if answer is not None:
            writer.write(answer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with router_over([p], [d], f"redis://127.0.0.1:{port}/0", redis_timeout=TIMEOUT) as front:
            for stream in (False, True):
                body = {**CHAT, "stream": stream, "conversation_id": "x"}
                begun = time.monotonic()
                answered = await front.post(body, headers=EXPLAIN)
                assert time.monotonic() - begun < 2 * TIMEOUT + MARGIN
                assert (answered.status, answered.explain["turn"]) == (200, 1)
    finally:
        server.close()
        for writer in clients:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in clients), return_exceptions=True)
        await server.wait_closed()

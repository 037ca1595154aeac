"""Redis is a cache: whatever it does, the client gets its answer, a little later at most."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis

from router.conversation import Record
from router.metrics import Metrics
from router.store import FAULTS_UNTIL_PAUSE, Store
from tests.router_harness import CHAT, router_over
from tests.stub_engine import StubEngine
from tests.valkey import Valkey, free_port, valkey

TIMEOUT = 0.1
MARGIN = 1.0
EXPLAIN = {"X-Backhaul-Explain": "1"}


def record(turn: int = 1, seconds: float = 60.0) -> Record:
    return Record(turn=turn, prefill=None, decode="http://d", deadline=time.time() + seconds, prompt_ids=b"\x01\0\0\0")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["chat"])


@asynccontextmanager
async def store_at(url: str, metrics: Metrics, seconds: float) -> AsyncIterator[Store]:
    store = Store(url, timeout=seconds, metrics=metrics)
    yield store
    await store.close()


@pytest.fixture
async def store(redis_url: str, metrics: Metrics) -> AsyncIterator[Store]:
    async with store_at(redis_url, metrics, 5.0) as store:
        yield store


def count(metrics: Metrics, op: str, result: str) -> float:
    return (
        metrics.registry.get_sample_value("backhaul_router_store_operations_total", {"op": op, "result": result}) or 0.0
    )


async def test_record_is_claimed_once(store: Store, redis_url: str, metrics: Metrics) -> None:
    saved = record()
    assert await store.save("once", saved)
    claims = await asyncio.gather(*(store.claim("once") for _ in range(50)))
    assert [claim for claim in claims if claim is not None] == [saved]
    assert (count(metrics, "claim", "hit"), count(metrics, "claim", "miss")) == (1, 49)


async def test_newest_turn_stays(store: Store, redis_url: str, metrics: Metrics) -> None:
    for turn in (1, 2):
        await store.save("newest", record(turn))
    await store.save("newest", record(1), unless_newer=True)
    claimed = await store.claim("newest")
    assert claimed is not None
    assert claimed.turn == 2


async def test_record_does_not_outlive_its_deadline(store: Store, redis_url: str, metrics: Metrics) -> None:
    assert not await store.save("late", record(seconds=-1))
    assert await store.claim("late") is None
    async with Redis.from_url(redis_url) as redis:
        await store.save("soon", record(seconds=30))
        assert 25_000 < await redis.pttl("soon") <= 30_000
        await redis.set("past", record(seconds=-1).pack())
    assert await store.claim("past") is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        b"\x01" + b"\xff" * 50,
        record().pack()[:20],
        replace(record(), deadline=cast("float", "z")).pack(),
        replace(record(), turn=cast("int", None)).pack(),
    ],
)
async def test_value_nobody_can_read_is_a_miss(store: Store, redis_url: str, metrics: Metrics, value: bytes) -> None:
    async with Redis.from_url(redis_url) as redis:
        await redis.set("odd", value)
    assert await store.claim("odd") is None
    assert count(metrics, "claim", "unreadable") == 1


async def test_value_of_another_type_is_a_miss(store: Store, redis_url: str, metrics: Metrics) -> None:
    async with Redis.from_url(redis_url) as redis:
        await redis.delete("list")
        await redis.lpush("list", "x")
    assert await store.claim("list") is None
    assert count(metrics, "claim", "error") == 1
    assert await store.ping()


async def test_cancelled_callers_do_not_mix_up_answers(store: Store, redis_url: str, metrics: Metrics) -> None:
    """A command given up half way must not leave its answer for the next command on that connection."""
    for turn in range(100):
        await store.save(f"mine-{turn}", record(turn))
    for turn in range(100):
        claim = asyncio.create_task(store.claim(f"mine-{turn}"))
        for _ in range(turn % 6):
            await asyncio.sleep(0)
        claim.cancel()
        await asyncio.sleep(0)
        claim.cancel()
        other = await store.claim(f"mine-{(turn + 1) % 100}")
        await store.save(f"mine-{(turn + 1) % 100}", record((turn + 1) % 100))
        assert other is None or other.turn == (turn + 1) % 100


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


async def test_first_fault_and_the_return_are_logged(
    metrics: Metrics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.store")
    port = free_port()
    with valkey(tmp_path, port) as server:
        async with store_at(server.url, metrics, 2.0) as store:
            assert await store.ping()
            assert not caplog.messages
            server.kill()
            for _ in range(FAULTS_UNTIL_PAUSE + 2):
                assert await store.claim("k") is None
                assert [message.split(":")[0] for message in caplog.messages] == ["Redis does not answer"]
            with valkey(tmp_path, port):
                await save_at_last(store, "k", record())
                assert await store.claim("k") is not None
    assert caplog.messages[1:] == ["Redis answers again"]


async def test_hanging_server_delays_by_the_timeout_only(metrics: Metrics, redis_url: str) -> None:
    async with store_at(redis_url, metrics, 0.5) as store:
        await save_at_last(store, "k", record(7))
        async with Redis.from_url(redis_url) as redis:
            await redis.execute_command("CLIENT", "PAUSE", "2500", "ALL")
        started = time.monotonic()
        assert await store.claim("k") is None
        assert time.monotonic() - started < 1.5
        assert count(metrics, "claim", "timeout") == 1
        await save_at_last(store, "k2", record(8))
        claimed = await store.claim("k2")
        assert claimed is not None
        assert claimed.turn == 8, "the late answer to the first claim was not taken for this one's"


async def save_at_last(store: Store, key: str, value: Record) -> None:
    deadline = time.monotonic() + 20
    while not await store.save(key, value):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


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


async def test_slow_server_gets_one_timeout_not_one_per_step(metrics: Metrics) -> None:
    """Every step of connecting and asking is answered within the timeout; all of them together are not."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(4096):
                await asyncio.sleep(0.4)
                writer.write(b"+OK\r\n")
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with store_at(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/1", metrics, 0.5) as store:
        started = time.monotonic()
        assert await store.claim("k") is None
        assert time.monotonic() - started < 1.0
    server.close()
    await server.wait_closed()

"""Whatever Redis does is a miss, in time, and leaves nothing behind: no mixed up reply, no lent connection, no lost
offer."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.metrics import Metrics
from router.record import pack_offer
from router.redis_link import LATE_SECONDS
from router.store import FAULTS_UNTIL_PAUSE, PAUSE_SECONDS, STAMP_BYTES, Claimed, Store
from tests.redis_stub import forwarder, serving
from tests.store_parts import count, eventually, names, offer, record, store_at
from tests.valkey import Valkey, free_port, valkey
from tests.valkey_groups import tell

TIMEOUT = 0.05
MARGIN = 0.5
"""What a busy machine may add."""


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["chat"])


async def use_in_vain(store: Store) -> None:
    """Every operation, each within its time, none of them with an effect."""
    stamp = b"s" * STAMP_BYTES
    started = time.monotonic()
    assert await store.claim("k") is None
    saved = await store.save("k", record(2), offer())
    assert (saved.kept, names(saved.orphans)) == (False, ["request"])
    assert not await store.put_back(Claimed("k", record(), offer(), stamp))
    assert await store.take_offer("k", stamp) is None
    assert time.monotonic() - started < 4 * TIMEOUT + MARGIN


Breakage = Callable[[Valkey], Awaitable[object]]


async def kill(server: Valkey) -> None:
    server.kill()


async def freeze(server: Valkey) -> None:
    server.process.send_signal(signal.SIGSTOP)


async def sleep(server: Valkey) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"DEBUG SLEEP 30\r\n")
    await writer.drain()
    writer.close()


async def pause(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("CLIENT", "PAUSE", "30000", "ALL")


async def lock(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("CONFIG", "SET", "requirepass", "secret")
        await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def forbid(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha")


async def demote(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("REPLICAOF", "127.0.0.1", "1")


async def fill(server: Valkey) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("CONFIG", "SET", "maxmemory", "1")


@pytest.mark.parametrize("breakage", [kill, freeze, sleep, pause, lock, forbid, demote])
async def test_broken_server_is_a_miss_in_time(tmp_path: Path, metrics: Metrics, breakage: Breakage) -> None:
    with valkey(tmp_path, None, "--enable-debug-command", "yes") as server:
        async with store_at(server.url, metrics=metrics) as store:
            assert (await store.save("k", record(), offer())).kept
            await breakage(server)
            store._link.timeout = TIMEOUT
            for _ in range(3):
                await use_in_vain(store)
            assert store.num_pending <= FAULTS_UNTIL_PAUSE
        assert store.num_pending == 0


async def test_nobody_there_is_a_miss_in_time(metrics: Metrics) -> None:
    async with store_at(f"redis://127.0.0.1:{free_port()}/0", seconds=TIMEOUT, metrics=metrics) as store:
        for _ in range(3):
            await use_in_vain(store)
        assert not await store.ping()
    assert count(metrics, "claim", "error") == 1
    assert count(metrics, "claim", "skipped") == 2


async def test_server_that_still_loads_is_a_miss_until_it_has(tmp_path: Path, metrics: Metrics) -> None:
    with valkey(tmp_path) as server:
        async with store_at(server.url) as store:
            assert (await store.save("k", record(), offer())).kept
        await tell(server, "EVAL", "for i = 1, 5000 do redis.call('SET', i, string.rep('x', 100)) end", 0)
        await tell(server, "SAVE")
    slowly = ("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
    with valkey(tmp_path, None, *slowly) as server:
        async with store_at(server.url, metrics=metrics) as store:
            await use_in_vain(store)
            assert count(metrics, "claim", "error") == 1
            assert await tell(server, "CONFIG", "SET", "key-load-delay", "0") == b"OK"

            async def found() -> bool:
                return await store.claim("k") is not None

            await eventually(found, 20.0)


async def test_address_that_swallows_packets_is_a_miss_in_time() -> None:
    """The backlog of a listening socket is full, so that connecting goes on for ever."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        host, port = listening.getsockname()
        others = [socket.socket() for _ in range(4)]
        for one in others:
            one.setblocking(False)
            one.connect_ex((host, port))
        async with store_at(f"redis://{host}:{port}/0", seconds=TIMEOUT) as store:
            await use_in_vain(store)
        for one in others:
            one.close()


async def test_full_server_is_read_but_not_written(tmp_path: Path, metrics: Metrics) -> None:
    with valkey(tmp_path) as server:
        async with store_at(server.url, metrics=metrics) as store:
            await store.save("k", record(1), offer("first"))
            await fill(server)
            for turn in range(2, 2 + FAULTS_UNTIL_PAUSE):
                saved = await store.save("k", record(turn), offer("second"))
                assert (saved.kept, names(saved.orphans)) == (False, ["second"])
            found = await store.claim("k")
            assert found is not None
            assert (found.record.turn, found.offer) == (1, offer("first")), "as it was"
            assert not await store.put_back(found)
    assert count(metrics, "save", "refused") == FAULTS_UNTIL_PAUSE


async def test_replica_is_not_held_on_to(tmp_path: Path, metrics: Metrics) -> None:
    """The address stays, the server behind it changes; the old one still answers on its connections."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with valkey(tmp_path / "a") as old, valkey(tmp_path / "b") as new:
        async with forwarder(old.port) as address, store_at(address.url, metrics=metrics) as store:
            await asyncio.gather(*(store.save(f"k{i}", record(), offer()) for i in range(8)))
            await demote(old)
            address.port = new.port
            assert not (await store.save("k", record(), offer())).kept
            for i in range(8):
                assert (await store.save(f"k{i}", record(), offer())).kept
                assert await store.claim(f"k{i}")
    assert count(metrics, "save", "refused") == 1


async def test_closed_idle_connections_are_no_fault(tmp_path: Path, metrics: Metrics) -> None:
    port = free_port()
    async with store_at(f"redis://127.0.0.1:{port}/0", metrics=metrics) as store:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            with valkey(tmp_path / folder, port):
                assert (await store.save("k", record(), offer())).kept
                assert store._link.is_connected

            async def noticed() -> bool:
                return not store._link.is_connected

            await eventually(noticed)
    assert count(metrics, "save", "ok") == 2


async def test_redis_is_left_alone_for_a_while_and_works_again(tmp_path: Path, metrics: Metrics) -> None:
    port = free_port()
    async with store_at(f"redis://127.0.0.1:{port}/0", metrics=metrics) as store:
        for _ in range(FAULTS_UNTIL_PAUSE):
            assert await store.claim("k") is None
        with valkey(tmp_path, port):
            paused = time.monotonic()
            assert await store.claim("k") is None
            assert count(metrics, "claim", "skipped") == 1

            async def saved() -> bool:
                return (await store.save("k", record(), offer())).kept

            await eventually(saved)
            assert time.monotonic() - paused > PAUSE_SECONDS / 2
            assert await store.claim("k") is not None


async def test_faults_and_their_end_are_logged_once(
    metrics: Metrics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.store")
    port = free_port()
    with valkey(tmp_path, port) as server:
        async with store_at(server.url, metrics=metrics) as store:
            assert (await store.save("k", record(), offer())).kept
            assert not caplog.messages
            await fill(server)
            for _ in range(5):
                assert not (await store.save("k", record(), offer())).kept
                assert await store.claim("k") is not None
            assert [message.split(":")[0] for message in caplog.messages] == ["Redis refuses commands"]
            async with Redis.from_url(server.url) as redis:
                await redis.execute_command("CONFIG", "SET", "maxmemory", "0")
            assert (await store.save("k", record(), offer())).kept
            assert caplog.messages[1:] == ["Redis takes commands again"]
            server.kill()
            caplog.clear()
            for _ in range(FAULTS_UNTIL_PAUSE + 2):
                assert await store.claim("k") is None
                assert [message.split(":")[0] for message in caplog.messages] == ["Redis does not answer"]
            with valkey(tmp_path, port):
                await eventually(store.ping)
    assert caplog.messages[1:] == ["Redis answers again"]


ANYTHING = [
    b"",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00\xff" * 100,
    b"$-5\r\n",
    b"*9\r\n",
    b"$2000000000\r\n",
    b"*4\r\n$5\r\nab",
    b"+OK\r\n",
    b":5\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*4\r\n:1\r\n:2\r\n:3\r\n:4\r\n",
    b"*2\r\n*0\r\n*0\r\n",
    b"*2\r\n$-1\r\n$-1\r\n",
    b"$3\r\n\xff\xfe\xfd\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"-MOVED nonsense\r\n",
    b"-ASK\r\n",
    b"-CLUSTERDOWN The cluster is down\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"-BUSY Redis is busy running a script\r\n",
    b"-MASTERDOWN Link with MASTER is down\r\n",
    b"-NOSCRIPT No matching script\r\n",
    b"-NOAUTH Authentication required.\r\n",
    b"-NOPERM no\r\n",
    b"-ERR \xff\xfe\r\n",
    b"-\r\n",
]


@pytest.mark.parametrize("answer", ANYTHING)
@pytest.mark.parametrize("then", ["wait", "close", "reset"])
async def test_server_that_says_anything_is_a_miss_in_time(answer: bytes, then: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            writer.write(answer)
            if then == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if then != "wait":
                break
        writer.close()

    async with serving(serve) as url, store_at(url, seconds=TIMEOUT) as store:
        await use_in_vain(store)
        await use_in_vain(store)
    assert store.num_pending == 0


@pytest.mark.parametrize("answer", ANYTHING)
@pytest.mark.parametrize("address", ["redis+sentinel://{}/records", "redis+cluster://{}"])
async def test_group_that_says_anything_is_a_miss_in_time(answer: bytes, address: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while commands := await reader.read(1 << 20):
            writer.write(answer * commands.count(b"*"))

    async with serving(serve) as url:
        where = url.removeprefix("redis://").removesuffix("/0")
        async with store_at(address.format(where), seconds=TIMEOUT) as store:
            await use_in_vain(store)
            await use_in_vain(store)
    assert store.num_pending == 0


async def test_slow_server_gets_one_timeout_not_one_per_step(metrics: Metrics) -> None:
    """Every step of connecting and asking is answered within the timeout; all of them together are not."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            await asyncio.sleep(0.8 * TIMEOUT)
            writer.write(b"+OK\r\n")
        writer.close()

    async with serving(serve) as url, store_at(url.replace("/0", "/1"), seconds=TIMEOUT, metrics=metrics) as store:
        await use_in_vain(store)
    assert count(metrics, "claim", "timeout") == 1


async def test_late_reply_is_not_taken_for_that_of_the_next(tmp_path: Path, metrics: Metrics) -> None:
    with valkey(tmp_path) as server:
        async with store_at(server.url, metrics=metrics) as store:
            await store.save("slow", record(7), None)
            await store.save("next", record(8), None)
            store._link.timeout = TIMEOUT
            await freeze(server)
            assert await store.claim("slow") is None
            assert count(metrics, "claim", "timeout") == 1
            server.process.send_signal(signal.SIGCONT)
            store._link.timeout = 5.0
            found = await store.claim("next")
            assert found is not None
            assert found.record.turn == 8


async def test_what_a_late_command_did_is_undone(tmp_path: Path, metrics: Metrics) -> None:
    """Told that it failed, the caller has gone on; a little later it succeeds."""
    with valkey(tmp_path) as server:
        async with store_at(server.url, metrics=metrics) as store, Redis.from_url(server.url) as redis:

            async def while_frozen(use: Callable[[], Awaitable[object]]) -> object:
                store._link.timeout = TIMEOUT
                server.process.send_signal(signal.SIGSTOP)
                try:
                    return await use()
                finally:
                    server.process.send_signal(signal.SIGCONT)
                    await eventually(settled)
                    store._link.timeout = 5.0

            async def settled() -> bool:
                return not store.num_pending

            first = await store.save("k", record(), offer())
            assert await while_frozen(lambda: store.claim("k")) is None
            assert await redis.hget("k", "offer") == pack_offer(offer()), "of the record somebody may still claim"
            assert await while_frozen(lambda: store.take_offer("k", first.stamp)) is None
            assert await redis.hexists("k", "offer")

            found = await store.claim("k")
            assert found is not None
            assert await while_frozen(lambda: store.put_back(found)) is None, "nobody knows"
            assert not await redis.hexists("k", "offer"), "the caller has released it"

            assert await store.put_back(found)
            await while_frozen(lambda: store.save("k", record(2), offer("released")))
            again = await store.claim("k")
            assert again is not None
            assert (again.record.turn, again.offer) == (2, None)
    assert LATE_SECONDS > 10 * TIMEOUT


async def test_busy_process_does_not_blame_redis(redis_url: str, metrics: Metrics) -> None:
    """The reply was here in time; only nobody came to read it."""
    async with store_at(redis_url, metrics=metrics) as store:
        long = record(ids=tuple(range(100_000)))
        await store.save("busy", long, offer(num_blocks=6_250))
        store._link.timeout = TIMEOUT
        claim = asyncio.create_task(store.claim("busy"))
        await until_sent(store)
        time.sleep(10 * TIMEOUT)  # noqa: ASYNC251
        found = await claim
        assert found is not None
        assert found.record == long


async def until_sent(store: Store) -> None:
    for _ in range(100):
        if store.num_pending:
            break
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(4))
async def test_cancelled_callers_mix_up_and_lose_nothing(redis_url: str, seed: int) -> None:
    """A command given up half way must not leave its reply for the next one, keep its connection, or lose an offer."""
    rng = random.Random(seed)
    keys = [f"cancelled-{seed}-{number}" for number in range(20)]
    async with store_at(redis_url) as store:
        # Saved with different lengths, so that some replies come in one piece and some in several.
        for turn, key in enumerate(keys, start=1):
            await store.save(key, record(turn, ids=tuple(range(turn**4))), offer(key))

        async def turns() -> None:
            for _ in range(20):
                turn = rng.randrange(len(keys))
                found = await store.claim(keys[turn])
                assert found is not None
                assert (found.key, found.record.turn) == (keys[turn], turn + 1)
                if found.offer is not None:
                    assert found.offer.remote_request_id == keys[turn]
                    assert await store.put_back(found)

        load = [asyncio.create_task(turns()) for _ in range(4)]
        for _ in range(200):
            claim = asyncio.create_task(store.claim(rng.choice(keys)))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.004)
            claim.cancel()
            await asyncio.sleep(0)
            claim.cancel()
            await asyncio.wait([claim])
            if not claim.cancelled() and (found := claim.result()) is not None and found.offer is not None:
                assert await store.put_back(found)
        await asyncio.gather(*load)

        async def settled() -> bool:
            return not store.num_pending

        await eventually(settled)
        for turn, key in enumerate(keys, start=1):
            found = await store.claim(key)
            assert found is not None
            assert (found.record.turn, found.offer) == (turn, offer(key))


async def test_cancelled_save_stays(redis_url: str) -> None:
    """Nobody was told that it failed."""
    async with store_at(redis_url) as store:
        save = asyncio.create_task(store.save("left", record(4), offer()))
        await until_sent(store)
        save.cancel()
        await asyncio.wait([save])
        assert save.cancelled()

        async def settled() -> bool:
            return not store.num_pending

        await eventually(settled)
        found = await store.claim("left")
        assert found is not None
        assert found.offer == offer()


async def test_commands_are_bounded(redis_url: str, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.redis_link.MAX_PENDING", 5)
    async with store_at(redis_url, metrics=metrics) as store:
        await asyncio.gather(*(store.claim("bounded") for _ in range(20)))
    assert count(metrics, "claim", "skipped") == 15

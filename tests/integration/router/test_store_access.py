"""Who may use Redis: users with few rights, passwords that are wrong and those that change."""

from __future__ import annotations

import logging
import socket
import time
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.metrics import Metrics
from router.store import Store
from tests.redis_stub import sentinel
from tests.store_parts import count, eventually, offer, record, store_at
from tests.valkey import valkey
from tests.valkey_groups import cluster_group, tell

DOCS = Path(__file__).parents[3] / "docs/redis.md"
KEY = "backhaul:conversation:2:key"
TIMEOUT = 0.1
MARGIN = 0.5
"""What a busy machine may add."""
PASSWORD = "hunter2"


def documented(mark: str) -> list[str]:
    """The rights of the user in our documentation whose line has this in it."""
    (line,) = [line for line in DOCS.read_text().splitlines() if line.startswith("user ") and mark in line]
    return [word.replace("PASSWORD", PASSWORD) for word in line.split()[2:]]


async def operations(url: str, redis: Redis) -> bool:
    """Whether everything the router does to its store can be done."""
    metrics = Metrics(["chat"])
    async with store_at(url, metrics=metrics) as store:
        return await _operations(store, redis) and count(metrics, "save", "older") == 1


async def _operations(store: Store, redis: Redis) -> bool:
    await redis.execute_command("SCRIPT", "FLUSH")
    await redis.delete(KEY)
    saved = await store.save(KEY, record(2), offer())
    await store.save(KEY, record(1), None)
    found = await store.claim(KEY)
    if not (await store.ping() and saved.kept and found is not None and await store.put_back(found)):
        return False
    if await store.take_offer(KEY, saved.stamp) != offer():
        return False
    await redis.hset(KEY, "record", b"unreadable")
    await store.claim(KEY)

    async def settled() -> bool:
        return not store.num_pending

    await eventually(settled)
    return not await redis.exists(KEY)


async def test_documented_rights_are_those_needed(tmp_path: Path) -> None:
    rights = documented("+evalsha")
    with valkey(tmp_path) as server:
        async with Redis.from_url(server.url) as redis:
            await redis.execute_command("ACL", "SETUSER", "default", ">admin")
            await redis.execute_command("ACL", "SETUSER", "backhaul", *rights)
            url = server.url.replace("://", f"://backhaul:{PASSWORD}@")
            assert await operations(url, redis)
            async with store_at(url) as store:
                assert not (await store.save("other:key", record(), None)).kept
            for right in (right for right in rights if right.startswith("+")):
                await redis.execute_command("ACL", "SETUSER", "backhaul", right.replace("+", "-"))
                assert not await operations(url, redis), f"{right} is not needed"
                await redis.execute_command("ACL", "SETUSER", "backhaul", right)


async def test_documented_rights_do_for_sentinel_and_another_database(tmp_path: Path) -> None:
    with valkey(tmp_path) as server:
        await tell(server, "ACL", "SETUSER", "backhaul", *documented("+evalsha"), "+role", "+select", "+client|setname")
        async with sentinel(lambda: server.port) as knows:
            url = f"redis+sentinel://backhaul:{PASSWORD}@{knows}/records/3?client_name=router"
            async with store_at(url) as store:
                assert (await store.save(KEY, record(), offer())).kept
            async with store_at(server.url.removesuffix("/0") + "/3") as store:
                assert await store.claim(KEY) is not None


async def test_documented_rights_do_for_a_cluster(tmp_path: Path) -> None:
    async with cluster_group(tmp_path) as group:
        rights = (*documented("+evalsha"), "+cluster|slots", "+asking")
        for node in (*group.masters, group.replica):
            await tell(node.server, "ACL", "SETUSER", "backhaul", *rights)
        keys = [f"{KEY}-{number}" for number in range(20)]
        metrics = Metrics(["chat"])
        async with store_at(group.url.replace("://", f"://backhaul:{PASSWORD}@"), metrics=metrics) as store:
            for key in keys:
                assert (await store.save(key, record(), offer())).kept
        assert count(metrics, "save", "refused") == 0


async def test_wrong_password_is_a_miss_and_a_new_one_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file, metrics = tmp_path / "password", Metrics(["chat"])
    file.write_text("wrong-secret\n")
    with valkey(tmp_path, None, "--requirepass", PASSWORD) as server:
        store = Store(server.url, password_file=file, timeout=TIMEOUT, metrics=metrics)
        for _ in range(5):
            started = time.monotonic()
            assert await store.claim(KEY) is None
            assert time.monotonic() - started < TIMEOUT + MARGIN
        file.unlink()

        async def asked_again() -> bool:
            before = count(metrics, "claim", "error") + count(metrics, "claim", "timeout")
            assert await store.claim(KEY) is None
            return count(metrics, "claim", "error") + count(metrics, "claim", "timeout") > before

        await eventually(asked_again)
        file.write_text(PASSWORD + "\nsecond line")

        async def kept() -> bool:
            return (await store.save(KEY, record(), offer())).kept

        await eventually(kept)
        await store.close()
    assert "Redis does not answer" in caplog.text
    assert PASSWORD not in caplog.text
    assert "secret" not in caplog.text


async def test_socket(tmp_path: Path) -> None:
    with valkey(tmp_path, None, "--unixsocket", str(tmp_path / "s"), "--requirepass", PASSWORD):
        await eventually(partial(_listens, tmp_path / "s"))  # a port is listened to before
        async with store_at(f"unix://:{PASSWORD}@{tmp_path}/s?db=2") as store:
            assert (await store.save(KEY, record(), offer())).kept
            assert await store.claim(KEY) is not None


async def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0

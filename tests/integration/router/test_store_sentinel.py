"""A store whose master is found through sentinels, and changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from router.metrics import Metrics
from router.redis_link import LATE_SECONDS
from router.store import Store
from tests.redis_stub import sentinel
from tests.store_parts import count, eventually, names, offer, record, store_at
from tests.valkey import Valkey, free_port, valkey
from tests.valkey_groups import FAST_SYNC, sentinel_group, tell

TIMEOUT = 0.1
MARGIN = 0.5
"""What a busy machine may add."""
FAILOVER_SECONDS = 30.0


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["chat"])


async def turns_until_kept(store: Store, turns: Iterator[int]) -> int:
    """Turns that were misses, each in time, until one is remembered."""
    num_misses = 0

    async def remembered() -> bool:
        nonlocal num_misses
        started = time.monotonic()
        found = await store.claim("k")
        between = time.monotonic()
        saved = await store.save("k", record(next(turns)), offer("next"))
        assert max(between - started, time.monotonic() - between) < TIMEOUT + MARGIN
        if not saved.kept:
            assert names(saved.orphans) == ["next"]
            num_misses += found is None
        return saved.kept

    await eventually(remembered, FAILOVER_SECONDS)
    return num_misses


async def role(server: Valkey) -> bytes:
    said: bytes = (await tell(server, "ROLE"))[0]
    return said


async def test_failover_is_a_few_misses(tmp_path: Path, metrics: Metrics) -> None:
    async with sentinel_group(tmp_path) as group, store_at(group.url, seconds=TIMEOUT, metrics=metrics) as store:
        turns = itertools.count(1)
        await turns_until_kept(store, turns)
        group.master.kill()
        assert await turns_until_kept(store, turns) > 0
        assert await role(group.replica) == b"master"
        found = await store.claim("k")
        assert found is not None
        follow = ("--replicaof", f"127.0.0.1 {group.replica.port}")
        with valkey(tmp_path / "master", group.master.port, *FAST_SYNC, *follow) as back:
            assert await turns_until_kept(store, turns) == 0
            assert await role(back) == b"slave"


async def test_who_is_not_the_master_is_not_asked(tmp_path: Path, metrics: Metrics) -> None:
    """One sentinel hangs, one is gone, one names what has become a replica, one knows."""
    async with AsyncExitStack() as stack:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        master = stack.enter_context(valkey(tmp_path / "a"))
        replica = stack.enter_context(valkey(tmp_path / "b", None, "--replicaof", f"127.0.0.1 {master.port}"))
        hangs = await stack.enter_async_context(sentinel(lambda: None))
        behind = await stack.enter_async_context(sentinel(lambda: replica.port))
        knows = await stack.enter_async_context(sentinel(lambda: master.port))
        url = f"redis+sentinel://{hangs},127.0.0.1:{free_port()},{behind},{knows}/records"
        store = await stack.enter_async_context(store_at(url, seconds=2.0, metrics=metrics))
        assert (await store.save("k", record(), offer())).kept
        assert await store.claim("k") is not None
    assert count(metrics, "save", "ok") == 1


async def test_master_is_looked_up_anew_when_it_takes_no_more_writes(tmp_path: Path, metrics: Metrics) -> None:
    """It goes on answering on its connections."""
    async with AsyncExitStack() as stack:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        old = stack.enter_context(valkey(tmp_path / "a"))
        new = stack.enter_context(valkey(tmp_path / "b"))
        master = old
        knows = await stack.enter_async_context(sentinel(lambda: master.port))
        store = await stack.enter_async_context(store_at(f"redis+sentinel://{knows}/records", metrics=metrics))
        assert (await store.save("k", record(), offer())).kept
        await tell(old, "REPLICAOF", "127.0.0.1", free_port())
        master = new
        assert not (await store.save("k", record(2), offer())).kept
        assert (await store.save("k", record(2), offer())).kept
    assert count(metrics, "save", "refused") == 1


async def test_no_sentinel_that_helps_is_a_miss_in_time(metrics: Metrics) -> None:
    async with AsyncExitStack() as stack:
        hang = [await stack.enter_async_context(sentinel(lambda: None)) for _ in range(3)]
        url = f"redis+sentinel://{','.join(hang)}/records"
        store = await stack.enter_async_context(store_at(url, seconds=TIMEOUT, metrics=metrics))
        for _ in range(5):
            started = time.monotonic()
            assert await store.claim("k") is None
            assert time.monotonic() - started < TIMEOUT + MARGIN
    assert store.num_pending == 0
    assert count(metrics, "claim", "timeout") + count(metrics, "claim", "error") == 3
    assert LATE_SECONDS > TIMEOUT

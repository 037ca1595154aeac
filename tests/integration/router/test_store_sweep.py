"""Offers of conversations that did not go on are given back, by one router each, whatever Redis does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from connectors.wire.transfer import KVTransferParams
from router.store import Store
from router.sweep import LEAD_SECONDS, Sweeper
from tests.store_parts import eventually, offer, record, store_at
from tests.valkey import free_port, valkey


class Released:
    def __init__(self) -> None:
        self.names: list[str | None] = []

    async def release(self, offered: KVTransferParams) -> None:
        self.names.append(offered.remote_request_id)


async def save(store: Store, sweeper: Sweeper, key: str, turn: int, seconds: float) -> None:
    saved = record(turn, seconds)
    result = await store.save(key, saved, offer(f"{key}-{turn}"))
    assert result.kept
    sweeper.watch(key, result.stamp, saved.deadline)


async def test_two_routers_release_what_nobody_claimed_once(redis_url: str) -> None:
    released = Released()
    seconds = LEAD_SECONDS + 0.5
    async with store_at(redis_url) as one, store_at(redis_url) as other:
        sweepers = [Sweeper(store, released.release) for store in (one, other)]
        for sweeper in sweepers:
            sweeper.start()
        await save(one, sweepers[0], "swept-left", 1, seconds)
        await save(one, sweepers[0], "swept-claimed", 1, seconds)
        await save(one, sweepers[0], "swept-went-on", 1, seconds)
        await save(other, sweepers[1], "swept-went-on", 2, seconds)
        await save(other, sweepers[1], "swept-put-back", 1, seconds)
        assert await other.claim("swept-claimed")
        found = await one.claim("swept-put-back")
        assert found is not None
        assert await one.put_back(found)

        async def idle() -> bool:
            return not any(sweeper.num_watched for sweeper in sweepers)

        await eventually(idle)

        async def all_released() -> bool:
            return len(released.names) >= 3

        await eventually(all_released)
        for sweeper in sweepers:
            await sweeper.close()
    assert sorted(str(name) for name in released.names) == ["swept-left-1", "swept-put-back-1", "swept-went-on-2"]


async def test_redis_may_come_and_go(tmp_path: Path) -> None:
    released = Released()
    port = free_port()
    async with store_at(f"redis://127.0.0.1:{port}/0") as store:
        sweeper = Sweeper(store, released.release)
        sweeper.start()
        sweeper.watch("nowhere", b"s", time.time())
        with valkey(tmp_path, port):
            await eventually(store.ping)
            await save(store, sweeper, "a", 1, LEAD_SECONDS + 0.2)
            await asyncio.sleep(0)
        sweeper.watch("nowhere", b"t", time.time())

        async def idle() -> bool:
            return not sweeper.num_watched

        await eventually(idle)
        with valkey(tmp_path, port):
            await eventually(store.ping)
            await save(store, sweeper, "b", 1, LEAD_SECONDS + 0.2)

            async def seen() -> bool:
                return released.names == ["b-1"]

            await eventually(seen)
        await sweeper.close()

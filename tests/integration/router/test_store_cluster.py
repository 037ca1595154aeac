"""A store over a cluster: keys on all nodes, slots that move, nodes that are lost."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from router.metrics import Metrics
from router.redis_cluster import MAX_HOPS
from router.store import Saved, Store
from tests.redis_stub import serving
from tests.store_parts import count, eventually, names, offer, record, store_at
from tests.valkey_groups import ClusterGroup, Node, cluster_group, tell

TIMEOUT = 0.1
MARGIN = 0.5
"""What a busy machine may add."""
FAILOVER_SECONDS = 30.0


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["chat"])


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[ClusterGroup]:
    async with cluster_group(tmp_path) as group:
        yield group


async def move(key: str, source: Node, target: Node) -> None:
    """Give the slot of a key to another node, with all that is in it."""
    slot = key_slot(key.encode())
    await tell(target.server, "CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    await tell(source.server, "CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
    for found in await tell(source.server, "CLUSTER", "GETKEYSINSLOT", slot, 1000):
        await tell(source.server, "MIGRATE", "127.0.0.1", target.server.port, found, 0, 5000)
    for node in (target, source):
        await tell(node.server, "CLUSTER", "SETSLOT", slot, "NODE", target.id)


async def works(store: Store, key: str, turn: int = 1) -> None:
    """Every operation."""
    saved = await store.save(key, record(turn), offer(key))
    assert saved.kept
    found = await store.claim(key)
    assert found is not None
    assert (found.record.turn, found.offer) == (turn, offer(key))
    assert await store.put_back(found)
    assert await store.take_offer(key, saved.stamp) == offer(key)


async def test_keys_are_spread_over_all_nodes_and_follow_their_slots(group: ClusterGroup, metrics: Metrics) -> None:
    """One address is given, and nothing of this is seen from outside."""
    keys = [f"spread-{number}" for number in range(60)]
    async with store_at(group.url, metrics=metrics) as store:
        await asyncio.gather(*(works(store, key) for key in keys))
        for node in group.masters:
            assert await tell(node.server, "DBSIZE") > 0
        source, target = group.masters[:2]
        key = group.key(source)
        await works(store, key)
        await move(key, source, target)
        await works(store, key, 2)

        slot = key_slot(b"later")
        source = group.owner("later")
        target = next(node for node in group.masters if node is not source)
        await tell(target.server, "CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        await tell(source.server, "CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        await works(store, "later")
        assert await tell(source.server, "CLUSTER", "COUNTKEYSINSLOT", slot) == 0
        assert await tell(target.server, "CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        assert await store.ping()
    assert {count(metrics, "save", result) for result in ("error", "timeout", "refused", "skipped")} == {0}
    assert count(metrics, "claim", "hit") == len(keys) + 3


async def test_lost_node_is_a_miss_in_time_and_the_others_go_on(group: ClusterGroup, metrics: Metrics) -> None:
    """Without a replica its keys are lost until it is back; with one, until that takes over."""
    replicated, *others = group.masters
    alone = others[0]
    async with store_at(group.url, seconds=TIMEOUT, metrics=metrics) as store:
        for node in group.masters:

            async def kept(key: str = group.key(node)) -> bool:
                return (await store.save(key, record(1), offer())).kept

            await eventually(kept)
        for lost in (replicated, alone):
            lost.server.process.send_signal(signal.SIGSTOP if lost is replicated else signal.SIGKILL)
            started = time.monotonic()
            saved = await store.save(group.key(lost), record(2), offer("lost"))
            assert time.monotonic() - started < TIMEOUT + MARGIN
            assert (saved.kept, names(saved.orphans)) == (False, ["lost"])

            async def other_kept() -> bool:
                return (await store.save(group.key(others[1]), record(2), offer())).kept

            await eventually(other_kept)
            if lost is replicated:

                async def taken_over() -> bool:
                    started = time.monotonic()
                    kept = (await store.save(group.key(replicated), record(3), offer())).kept
                    assert time.monotonic() - started < TIMEOUT + MARGIN
                    return kept

                await eventually(taken_over, FAILOVER_SECONDS)
                assert (await tell(group.replica.server, "ROLE"))[0] == b"master"
        assert not (await store.save(group.key(alone), record(3), offer())).kept
    assert store.num_pending == 0


async def test_nodes_that_send_on_for_ever_are_a_miss_and_not_asked_for_ever(metrics: Metrics) -> None:
    """Both send to the other, and neither has a map. (The host that is left out is that of who says so.)"""
    ports: list[str] = []
    num_commands = num_maps = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_commands, num_maps
        own = writer.get_extra_info("sockname")[1]
        while data := await reader.read(1 << 16):
            for word in re.findall(rb"EVALSHA|SLOTS", data):
                num_maps += word == b"SLOTS"
                num_commands += word == b"EVALSHA"
                other = next(port for port in ports if port != str(own))
                writer.write(b"-ERR no\r\n" if word == b"SLOTS" else f"-MOVED 1 :{other}\r\n".encode())

    async with serving(serve) as one, serving(serve) as two:
        ports += [url.removesuffix("/0").rpartition(":")[2] for url in (one, two)]
        async with store_at(f"redis+cluster://127.0.0.1:{ports[0]}", metrics=metrics) as store:
            for _ in range(20):
                assert await store.claim("k") is None
    assert count(metrics, "claim", "refused") == 20
    assert num_commands == 20 * (1 + MAX_HOPS)
    assert 1 <= num_maps <= 10


async def test_cancelled_save_is_sent_on_and_its_caller_told(group: ClusterGroup) -> None:
    """Nobody waits for it, but an offer is in it."""
    left: list[Saved] = []
    async with store_at(group.url) as store:
        first, second = group.key(group.masters[0]), group.key(group.masters[1])
        save = asyncio.create_task(store.save(first, record(), offer(), left.append))
        await asyncio.sleep(0)
        save.cancel()
        await asyncio.wait([save])
        assert save.cancelled()

        async def told() -> bool:
            return bool(left)

        await eventually(told)
        assert left[0].kept
        found = await store.claim(first)
        assert found is not None
        assert found.offer == offer()
        await works(store, second)

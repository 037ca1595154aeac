"""A store over a cluster: keys on all nodes, slots that move, nodes that are lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from router.metrics import Metrics
from router.store import Store
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

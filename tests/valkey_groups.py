"""Several Valkey servers that belong together: a master with its replica and sentinels, and a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis.crc import key_slot

from router.redis_address import Access, Endpoint
from router.redis_connection import connect
from router.redis_link import Link
from tests.store_parts import eventually
from tests.valkey import Valkey, free_port, listening, valkey

SERVICE = "records"
START_SECONDS = 30.0
NUM_SLOTS = 16384
FAST_SYNC = ("--repl-diskless-sync-delay", "0")


async def tell(server: Valkey, *command: str | bytes | int) -> Any:
    """The reply, as it is. Raises what is an error."""
    link = Link(partial(connect, Access(False, {}), Endpoint("127.0.0.1", server.port)), timeout=10.0)
    try:
        reply = await link.send(*command).future
    finally:
        await link.close()
    if isinstance(reply, Exception):
        raise reply
    return reply


@dataclass
class SentinelGroup:
    master: Valkey
    replica: Valkey
    sentinels: list[Valkey]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/{SERVICE}/0"


@asynccontextmanager
async def sentinel_group(folder: Path, *, down_after_ms: int = 600) -> AsyncIterator[SentinelGroup]:
    with ExitStack() as stack:
        for name in ("master", "replica"):
            (folder / name).mkdir()
        master = stack.enter_context(valkey(folder / "master", None, *FAST_SYNC))
        follow = ("--replicaof", f"127.0.0.1 {master.port}")
        replica = stack.enter_context(valkey(folder / "replica", None, *FAST_SYNC, *follow))
        sentinels = [
            stack.enter_context(_sentinel(folder / f"sentinel-{number}", master, down_after_ms)) for number in range(3)
        ]

        async def know_each_other() -> bool:
            for sentinel in sentinels:
                said = await tell(sentinel, "SENTINEL", "MASTER", SERVICE)
                known = dict(zip(said[::2], said[1::2], strict=True))
                if (known[b"num-slaves"], known[b"num-other-sentinels"]) != (b"1", b"2"):
                    return False
            return bool((await tell(replica, "ROLE"))[3] == b"connected")

        await eventually(know_each_other, START_SECONDS)
        yield SentinelGroup(master, replica, sentinels)


def _sentinel(folder: Path, master: Valkey, down_after_ms: int) -> Any:
    folder.mkdir()
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\n"
        "bind 127.0.0.1\n"
        f'dir "{folder}"\n'
        f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )
    return listening(port, str(config), "--sentinel")


@dataclass
class Node:
    server: Valkey
    id: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@dataclass
class ClusterGroup:
    masters: list[Node]
    replica: Node
    """Of the first."""

    @property
    def url(self) -> str:
        """By one node only: the others are to be found."""
        return f"redis+cluster://{self.masters[-1].address}"

    def owner(self, key: str) -> Node:
        """As it is at the start."""
        return self.masters[key_slot(key.encode()) * len(self.masters) // NUM_SLOTS]

    def key(self, node: Node, text: str = "key") -> str:
        """One that this master has."""
        return next(key for number in range(1000) if self.owner(key := f"{text}-{number}") is node)


@asynccontextmanager
async def cluster_group(
    folder: Path, *, node_timeout_ms: int = 1000, num_masters: int = 3
) -> AsyncIterator[ClusterGroup]:
    """Three masters, and a replica of the first. If one has no replica, the others go on without it."""
    with ExitStack() as stack:
        nodes = []
        for number in range(num_masters + 1):
            (folder / f"node-{number}").mkdir()
            options = (
                *("--cluster-enabled", "yes", "--cluster-port", str(bus := free_port())),
                *("--cluster-node-timeout", str(node_timeout_ms), "--cluster-require-full-coverage", "no"),
                *FAST_SYNC,
            )
            server = stack.enter_context(valkey(folder / f"node-{number}", None, *options))
            nodes.append((Node(server, (await tell(server, "CLUSTER", "MYID")).decode()), bus))
            await tell(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        masters, replica = [node for node, _ in nodes[:-1]], nodes[-1][0]
        bounds = [-(-NUM_SLOTS * number // num_masters) for number in range(num_masters + 1)]
        for master, first, end in zip(masters, bounds, bounds[1:], strict=False):
            await tell(master.server, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node, bus in nodes[1:]:
            await tell(masters[0].server, "CLUSTER", "MEET", "127.0.0.1", node.server.port, bus)

        async def agree() -> bool:
            said = [await tell(node.server, "CLUSTER", "INFO") for node, _ in nodes]
            known = b"cluster_known_nodes:%d\r\n" % len(nodes)
            return all(b"cluster_state:ok" in one and known in one and b"slots_ok:16384" in one for one in said)

        await eventually(agree, START_SECONDS)
        await tell(replica.server, "CLUSTER", "REPLICATE", masters[0].id)

        async def replicated() -> bool:
            role = await tell(replica.server, "ROLE")
            return role[0] == b"slave" and role[3] == b"connected"

        await eventually(replicated, START_SECONDS)

        async def seen_as_replica() -> bool:
            views = await asyncio.gather(*(tell(node.server, "CLUSTER", "NODES") for node in masters))
            return all(b"slave " + masters[0].id.encode() in view for view in views)

        await eventually(seen_as_replica, START_SECONDS)
        yield ClusterGroup(masters, replica)

"""Commands to a Redis cluster: one link to each node, and a map of which node has which slots.

The map is a guess that the nodes correct. Who has a slot no longer says who has it (MOVED), or whom to ask this once
(ASK), and the command goes on there; its caller sees nothing of that. Then, and when a node is lost, the whole map is
fetched again, in the background. A slot that nobody is known to have is asked of any node.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, Final

from hiredis import pack_command
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ClusterDownError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError

from router.redis_address import Endpoint, RedisAddress
from router.redis_backoff import Backoff
from router.redis_connection import connect
from router.redis_link import AskError, Command, Late, Link, MovedError

MAX_HOPS: Final = 3
"""Nodes that send a command on; then the last one's word is its reply."""

_ASKING: Final = pack_command(("ASKING",))


class Cluster:
    def __init__(self, address: RedisAddress, *, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._links: dict[Endpoint, Link] = {}
        self._slots: dict[int, Endpoint] = {}
        self._mapped: frozenset[Endpoint] = frozenset()
        """The nodes of the map as it was fetched."""
        self._retired: dict[asyncio.Task[None], Link] = {}
        """Of nodes that are no longer in the map, until what is under way has its reply."""
        self._refreshing: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        return sum(link.num_pending for link in chain(self._links.values(), self._retired.values()))

    @property
    def is_full(self) -> bool:
        return any(link.is_full for link in self._links.values())

    def send(self, *command: str | bytes | int, late: Late | None = None) -> Command:
        """As a link does. The command has no key, or is a script with one."""
        loop = asyncio.get_running_loop()
        data = pack_command(command)  # type: ignore[arg-type]
        slot = _slot(command[3]) if command[0] in ("EVAL", "EVALSHA") else None
        endpoint = self._slots.get(slot) if slot is not None else None
        if endpoint is None:
            endpoint = self._anyone()
        sent = _Routed(self, slot, endpoint, data, loop.create_future(), late, loop.time())
        self._link(endpoint).put(sent)
        return sent

    async def close(self) -> None:
        self._is_closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        await asyncio.gather(*(link.close() for link in self._links.values()), *self._retired)

    def passes_on(self, command: _Routed, error: Exception) -> bool:
        """Send a command on that its node did not take. False if the error is the reply."""
        if self._is_closed:
            return False
        if isinstance(error, MovedError | ClusterDownError | RedisConnectionError | ReadOnlyError):
            self._refresh_soon()
        if not isinstance(error, MovedError | AskError) or command.num_hops == MAX_HOPS:
            return False
        endpoint = _endpoint(str(error), command.endpoint)
        if endpoint is None:
            return False
        if isinstance(error, MovedError) and command.slot is not None:
            self._slots[command.slot] = endpoint
        command.num_hops += 1
        command.endpoint = endpoint
        link = self._link(endpoint)
        if isinstance(error, AskError):
            link.put(Command(_ASKING, asyncio.get_running_loop().create_future(), None, command.started))
        link.put(command)
        return True

    def _link(self, endpoint: Endpoint) -> Link:
        link = self._links.get(endpoint)
        if link is None:
            link = Link(partial(connect, self._address.data, endpoint), timeout=self._timeout)
            self._links[endpoint] = link
        return link

    def _anyone(self) -> Endpoint:
        """A node that will know; rather one that is there."""
        if not self._slots:
            self._refresh_soon()
        return next(self._nodes())

    def _nodes(self) -> Iterator[Endpoint]:
        """All that are known, best ones first, otherwise in any order: each may be lost or behind the times."""
        connected = [endpoint for endpoint, link in self._links.items() if link.is_connected]
        mapped = list(self._mapped)
        given = list(self._address.endpoints)
        for some in (connected, mapped, given):
            random.shuffle(some)
        return iter(dict.fromkeys((*connected, *mapped, *given)))

    def _refresh_soon(self) -> None:
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(), name="fetch the map of the Redis cluster")

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(self._backoff.until - loop.time())
            self._backoff.failed(loop.time())  # if it does not help, the next one comes later
            for endpoint in self._nodes():
                slots = _map(await self._link(endpoint).send("CLUSTER", "SLOTS").future, endpoint)
                if slots:
                    self._install(slots)
                    break
        finally:
            self._refreshing = None

    def _install(self, slots: dict[int, Endpoint]) -> None:
        self._slots, self._mapped = slots, frozenset(slots.values())
        for endpoint in [endpoint for endpoint in self._links if endpoint not in self._mapped]:
            link = self._links.pop(endpoint)
            closing = asyncio.create_task(link.close(), name="leave a node of the Redis cluster")
            self._retired[closing] = link
            closing.add_done_callback(self._retired.pop)


class _Routed(Command):
    """A command that may be sent from node to node before it has its reply."""

    __slots__ = ("cluster", "endpoint", "num_hops", "slot")

    def __init__(
        self,
        cluster: Cluster,
        slot: int | None,
        endpoint: Endpoint,
        data: bytes,
        future: asyncio.Future[Any],
        late: Late | None,
        started: float,
    ) -> None:
        super().__init__(data, future, late, started)
        self.cluster = cluster
        self.slot = slot
        self.endpoint = endpoint
        self.num_hops = 0

    def settle(self, reply: Any) -> None:
        if not (isinstance(reply, Exception) and self.cluster.passes_on(self, reply)):
            super().settle(reply)


def _slot(key: str | bytes | int) -> int:
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


def _endpoint(redirection: str, asked: Endpoint) -> Endpoint | None:
    """Out of `MOVED 3999 HOST:PORT`; without a host it is that of who says so."""
    words = redirection.split(" ")
    host, _, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536) or host == "?":
        return None
    return Endpoint(host or asked.host, int(port))


def _map(reply: Any, asked: Endpoint) -> dict[int, Endpoint]:
    """Out of the reply to CLUSTER SLOTS; nothing of what is not as it should be."""
    slots: dict[int, Endpoint] = {}
    for entry in reply if isinstance(reply, list) else ():
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if host != b"?" and port > 0:
                endpoint = Endpoint(host.decode(errors="replace") if host else asked.host, port)
                for slot in range(max(first, 0), min(last + 1, REDIS_CLUSTER_HASH_SLOTS)):
                    slots[slot] = endpoint
    return slots

"""Gives back the blocks of conversations that did not go on, just before their records expire.

vLLM's decode engine keeps blocks for a next turn until their lease ends. Once the record that offers them is gone
nobody can ask for them any more, so they need not wait for that. (An engine of ours is told beforehand for how long
they are of use.)
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from connectors.wire.transfer import KVTransferParams
from router.background import must_go_on
from router.store import Store

MAX_WATCHED: Final = 100_000
BATCH: Final = 16
"""Records looked at together."""
LEAD_SECONDS: Final = 1.0
"""How long before its deadline a record's offer is taken: a turn that comes later than this recomputes."""
LEAD_SHARE: Final = 1 / 8
"""Of a short life, at most so much."""
LOOK_SECONDS: Final = 1.0
"""At most this long between two looks at the clock, which somebody may set."""
RELEASE_SECONDS: Final = 10.0

log = logging.getLogger("router.sweep")


class Sweeper:
    """Watches the records this process has saved with an offer; a record saved anew is watched by whoever saved it.

    What is missed (Redis down, more than `limit` records, a restart) ends with the engine's lease, as it would anyway.
    """

    def __init__(
        self,
        store: Store,
        release: Callable[[KVTransferParams], Awaitable[None]],
        *,
        due: Callable[[str], None] = lambda _: None,
        limit: int = MAX_WATCHED,
    ) -> None:
        """`due` is told each key just before what is still there is taken."""
        self._store = store
        self._release = release
        self._is_due = due
        self._limit = limit
        self._heap: list[tuple[float, str, bytes]] = []
        self._newest: dict[str, bytes] = {}
        """Stamp of the last save by key: of what was replaced here there is nothing left to take."""
        self._earlier = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_watched(self) -> int:
        return len(self._newest)

    def watch(self, key: str, stamp: bytes, deadline: float) -> None:
        """Take the offer saved with this stamp if it is still there shortly before `deadline` (wall clock)."""
        if self._newest.get(key) == stamp:
            return
        self._newest[key] = stamp
        remaining = max(0.0, deadline - time.time())
        entry = (deadline - min(LEAD_SECONDS, LEAD_SHARE * remaining), key, stamp)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        else:
            self._forget(heapq.heappushpop(self._heap, entry))
        if self._heap[0] is entry:
            self._earlier.set()

    def start(self) -> None:
        assert self._task is None, "a sweeper is started once"
        self._task = asyncio.create_task(self._sweep(), name="sweep records")
        must_go_on(self._task, "offers of expired records are no longer released")

    async def close(self) -> None:
        """Stop at once; what is still watched is left to the engines' leases."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _sweep(self) -> None:
        while True:
            due = self._due(time.time())
            if due:
                await asyncio.gather(*(self._let_go(key, stamp) for key, stamp in due))
                continue
            self._earlier.clear()
            wait = self._heap[0][0] - time.time() if self._heap else LOOK_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(wait, 0.0), LOOK_SECONDS)):
                    await self._earlier.wait()

    def _due(self, now: float) -> list[tuple[str, bytes]]:
        """At most a batch of those whose time has come, without those saved anew since."""
        due: list[tuple[str, bytes]] = []
        while self._heap and self._heap[0][0] <= now and len(due) < BATCH:
            entry = heapq.heappop(self._heap)
            if self._forget(entry):
                due.append(entry[1:])
        return due

    def _forget(self, entry: tuple[float, str, bytes]) -> bool:
        """Whether the entry was still of interest."""
        _, key, stamp = entry
        if self._newest.get(key) != stamp:
            return False
        del self._newest[key]
        return True

    async def _let_go(self, key: str, stamp: bytes) -> None:
        self._is_due(key)
        offer = await self._store.take_offer(key, stamp)
        if offer is None:
            return
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._release(offer)
        except Exception as error:  # an engine that is gone has no blocks to give back, and the others' turn is next
            log.debug("blocks were not released", extra={"why": type(error).__name__})

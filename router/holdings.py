"""How much of the decode engines' caches conversations hold that are not being served, and the limit on it.

vLLM's decode engine keeps what it offers to a next turn until somebody reads it or its time is over, whoever else needs
the room. So what idle conversations hold there has an upper limit, kept by giving back the oldest offers. It is an
estimate, from what the offers of this process say: blocks that conversations share count for each of them, and what
another router has claimed counts until it would have expired.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from connectors.wire.transfer import KVTransferParams
from router.background import Background
from router.known import without_rank
from router.member import Engine
from router.metrics import Metrics
from router.pool import Pool
from router.release import Releases
from router.store import Store

MAX_HELD: Final = 100_000
"""Offers that are kept count of; beyond, the oldest are forgotten."""
BATCH: Final = 8
"""Offers taken out of the store together."""
MAX_DUE: Final = 1000
"""Offers waiting for that; beyond, what is over the limit waits for the next that is saved."""
SHARE: Final = 0.5
"""Of its blocks, for engines that keep them whoever needs the room; those of ours give way by themselves."""


@dataclass(frozen=True, slots=True)
class _Held:
    stamp: bytes
    num_blocks: int
    deadline: float


@dataclass(slots=True)
class _Cache:
    """The KV cache of one engine; of one rank, if it is data-parallel."""

    engine: Engine
    held: OrderedDict[str, _Held] = field(default_factory=OrderedDict)
    """By key, in the order in which they were saved; a plain dict is slow at its worn end."""
    num_blocks: int = 0

    def put(self, key: str, held: _Held) -> None:
        self.held[key] = held
        self.num_blocks += held.num_blocks

    def pop(self, key: str) -> _Held:
        held = self.held.pop(key)
        self.num_blocks -= held.num_blocks
        return held

    def oldest(self) -> tuple[str, _Held]:
        return next(iter(self.held.items()))


class Holdings:
    """Follows the offers that this process has saved, each until it is taken, replaced, given back or expired."""

    def __init__(
        self,
        pool: Pool,
        store: Store,
        releases: Releases,
        background: Background,
        metrics: Metrics,
        *,
        share: float | None = None,
        limit: int = MAX_HELD,
    ) -> None:
        """`share` of a decode engine's blocks is what idle conversations may hold; None: as its kind needs it."""
        self._store = store
        self._releases = releases
        self._background = background
        self._metrics = metrics
        self._share = share
        self._limit = limit
        self._cache_of: dict[str, _Cache] = {}
        self._engines: dict[str, Engine] = {}
        self._caches: dict[str, dict[str, _Cache]] = {}
        self._due: deque[tuple[str, _Held, str]] = deque()
        self._giving_back = False
        for engine in pool.decode:
            self._joined(engine)
        pool.on_join.append(self._joined)
        pool.on_leave.append(self._left)

    def _joined(self, engine: Engine) -> None:
        if engine.role == "decode":
            self._engines[engine.url] = engine
            self._caches[engine.url] = {}
            self._metrics.idle_blocks.labels(engine.name).set_function(partial(self.num_blocks, engine.url))
            self._metrics.capped_releases.add(engine.name, by=0)

    def _left(self, engine: Engine) -> None:
        """What was held there is lost, and so are its series."""
        if engine.role == "decode":
            self._forget(self._caches.pop(engine.url))
            del self._engines[engine.url]
            self._metrics.idle_blocks.remove(engine.name)
            self._metrics.capped_releases.drop(engine.name)

    @property
    def num_held(self) -> int:
        return len(self._cache_of)

    def num_blocks(self, url: str) -> int:
        """What idle conversations hold there, as far as is known."""
        now = time.time()
        for cache in self._caches[url].values():
            self._expire(cache, now)
        return sum(cache.num_blocks for cache in self._caches[url].values())

    def saved(self, key: str, stamp: bytes, url: str, offer: KVTransferParams, deadline: float) -> None:
        """A decode engine's offer is in the store, to be claimed until `deadline` (wall clock)."""
        self.taken(key)
        if url not in self._engines:
            return  # of another router, with other engines
        if self._most(self._engines[url]) is None:
            return  # nothing to keep to, so nothing to remember
        cache = self._cache(url, offer.remote_engine_id or "")
        num_blocks = sum(map(len, offer.remote_block_ids or ()))
        cache.put(key, _Held(stamp, num_blocks, deadline))
        self._cache_of[key] = cache
        self._expire(cache, time.time())
        if len(self._cache_of) > self._limit:
            self._drop(cache, cache.oldest()[0])
        most = self._most(cache.engine)
        if most is not None and cache.num_blocks > most:
            self._keep_to(cache, most)

    def taken(self, key: str) -> None:
        """The offer under this key is no longer in the store, or another is in its place."""
        cache = self._cache_of.pop(key, None)
        if cache is not None:
            cache.pop(key)

    def _cache(self, url: str, engine_id: str) -> _Cache:
        caches = self._caches[url]
        cache = caches.get(engine_id)
        if cache is None:
            if caches and without_rank(next(iter(caches))) != without_rank(engine_id):
                self._forget(caches)  # it was started anew, and has nothing left of all that
            cache = caches[engine_id] = _Cache(self._engines[url])
        return cache

    def _forget(self, caches: dict[str, _Cache]) -> None:
        for cache in caches.values():
            for key in cache.held:
                del self._cache_of[key]
        caches.clear()

    def _drop(self, cache: _Cache, key: str) -> _Held:
        del self._cache_of[key]
        return cache.pop(key)

    def _expire(self, cache: _Cache, now: float) -> None:
        while cache.held:
            key, held = cache.oldest()
            if held.deadline > now:
                break
            self._drop(cache, key)

    def _most(self, engine: Engine) -> int | None:
        """Blocks of each of its caches that idle conversations may hold; None: all."""
        known = engine.known.now
        share = self._share
        if share is None:
            share = SHARE if known.kind == "vllm" else 1.0
        return None if share >= 1.0 or known.num_blocks is None else int(share * known.num_blocks)

    def _keep_to(self, cache: _Cache, most: int) -> None:
        if not self._releases.can(cache.engine):
            return  # taken out of the store, they would be there all the same, and of no use
        while cache.num_blocks > most and len(self._due) < MAX_DUE:
            key, _ = cache.oldest()
            self._due.append((key, self._drop(cache, key), cache.engine.name))
        if self._due and not self._giving_back:
            self._giving_back = True
            self._background.start(self._give_back())

    async def _give_back(self) -> None:
        try:
            while self._due:
                batch = [self._due.popleft() for _ in range(min(BATCH, len(self._due)))]
                await asyncio.gather(*(self._let_go(*one) for one in batch))
        finally:
            self._giving_back = False

    async def _let_go(self, key: str, held: _Held, engine: str) -> None:
        offer = await self._store.take_offer(key, held.stamp)
        if offer is not None:
            self._metrics.capped_releases.add(engine)
            await self._releases.release(offer)

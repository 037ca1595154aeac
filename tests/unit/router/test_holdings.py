"""What is kept count of, what is taken back, and how much of a decode engine that leaves."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from connectors.wire.transfer import KVTransferParams
from router.background import Background
from router.capabilities import Capabilities
from router.discovery.source import Found
from router.holdings import BATCH, Holdings
from router.metrics import Metrics
from router.pool import Pool
from router.release import Releases
from router.store import Store

D, OTHER = "http://d", "http://other"
VLLM = Capabilities(kind="vllm", version="0.32.0", num_blocks=100)
LATER = 1000.0


def offer(name: str, num_blocks: int, engine_id: str = "e") -> KVTransferParams:
    return KVTransferParams(
        remote_block_ids=[list(range(num_blocks))], remote_request_id=name, remote_engine_id=engine_id
    )


class Shelf:
    """A store of offers by key and stamp, as the real one takes them."""

    def __init__(self) -> None:
        self.offers: dict[tuple[str, bytes], KVTransferParams] = {}
        self.at_once = self.most_at_once = 0

    async def take_offer(self, key: str, stamp: bytes) -> KVTransferParams | None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return self.offers.pop((key, stamp), None)


class Released:
    def __init__(self) -> None:
        self.names: list[str | None] = []
        self.has_means = True

    def can(self, _: object) -> bool:
        return self.has_means

    async def release(self, blocks: KVTransferParams) -> None:
        self.names.append(blocks.remote_request_id)


class Parts:
    """Holdings over a pool of two decode engines, a store and releases that are looked at."""

    def __init__(self, pool: Pool, **settings: Any) -> None:
        self.shelf, self.released, self.background = Shelf(), Released(), Background()
        self.metrics = Metrics(["chat"])
        self.pool = pool
        self.holdings = Holdings(
            pool,
            cast(Store, self.shelf),
            cast(Releases, self.released),
            self.background,
            self.metrics,
            **settings,
        )

    def save(self, key: str, num_blocks: int, *, url: str = D, engine_id: str = "e", deadline: float = LATER) -> None:
        stamp = key.encode()
        offered = offer(key, num_blocks, engine_id)
        self.shelf.offers[key, stamp] = offered
        self.holdings.saved(key, stamp, url, offered, time.time() + deadline)

    async def settle(self) -> None:
        await self.background.settle(5)

    def gauge(self, url: str = D) -> float | None:
        return self.metrics.registry.get_sample_value("backhaul_router_idle_kv_blocks", {"engine": url})

    def capped(self) -> float | None:
        return self.metrics.registry.get_sample_value("backhaul_router_kv_capped_releases_total", {"engine": D})


@pytest.fixture
async def pool() -> Pool:
    pool = Pool(["decode"])
    pool.update("decode", "test", [Found(D), Found(OTHER)])
    for engine in pool.decode:
        engine.known.found(VLLM)
    return pool


@pytest.fixture
def parts(pool: Pool) -> Parts:
    return Parts(pool)


async def test_oldest_are_given_back_beyond_the_share(parts: Parts) -> None:
    for number in range(5):
        parts.save(f"c{number}", 10)
    await parts.settle()
    assert (parts.released.names, parts.gauge()) == ([], 50)
    parts.save("c5", 15)
    await parts.settle()
    assert parts.released.names == ["c0", "c1"]
    assert (parts.gauge(), parts.gauge(OTHER), parts.capped()) == (45, 0, 2)


async def test_what_a_turn_takes_is_not_counted_nor_given_back(parts: Parts) -> None:
    parts.save("a", 30)
    parts.save("b", 20)
    parts.holdings.taken("a")
    assert parts.gauge() == 20
    parts.save("c", 30)
    await parts.settle()
    assert (parts.released.names, parts.gauge()) == ([], 50)
    parts.holdings.taken("nobody knows")


async def test_conversation_saved_anew_counts_once_and_is_the_newest(parts: Parts) -> None:
    parts.save("a", 20)
    parts.save("b", 20)
    parts.save("a", 25)
    assert parts.gauge() == 45
    parts.save("c", 20)
    await parts.settle()
    assert parts.released.names == ["b"]


async def test_one_that_moved_counts_where_it_is_now(parts: Parts) -> None:
    parts.save("a", 20)
    parts.save("a", 20, url=OTHER)
    assert (parts.gauge(), parts.gauge(OTHER)) == (0, 20)


async def test_what_another_router_has_claimed_is_not_released(parts: Parts) -> None:
    parts.save("a", 50)
    parts.shelf.offers.clear()
    parts.save("b", 10)
    await parts.settle()
    assert (parts.released.names, parts.capped(), parts.gauge()) == ([], 0, 10)


async def test_expired_offers_are_no_longer_held(parts: Parts) -> None:
    parts.save("a", 40, deadline=-1.0)
    assert parts.gauge() == 0
    assert parts.holdings.num_held == 0
    parts.save("b", 40)
    await parts.settle()
    assert parts.released.names == []


async def test_engine_started_anew_holds_nothing_of_before(parts: Parts) -> None:
    parts.save("a", 40)
    parts.save("b", 20, engine_id="new")
    await parts.settle()
    assert (parts.gauge(), parts.released.names, parts.holdings.num_held) == (20, [], 1)
    parts.holdings.taken("a")
    assert parts.gauge() == 20


async def test_each_rank_has_a_cache_of_its_own(parts: Parts) -> None:
    parts.save("a", 40, engine_id="e_dp0")
    parts.save("b", 40, engine_id="e_dp1")
    await parts.settle()
    assert (parts.gauge(), parts.released.names) == (80, [])
    parts.save("c", 40, engine_id="e_dp1")
    await parts.settle()
    assert parts.released.names == ["b"]


async def test_nothing_is_taken_that_could_not_be_given_back(parts: Parts) -> None:
    parts.released.has_means = False
    parts.save("a", 40)
    parts.save("b", 40)
    await parts.settle()
    assert (parts.gauge(), len(parts.shelf.offers)) == (80, 2)
    parts.released.has_means = True
    parts.save("c", 10)
    await parts.settle()
    assert parts.released.names == ["a"]


@pytest.mark.parametrize(
    ("share", "kind", "num_blocks", "released"),
    [
        (None, "vllm", 100, ["a", "b"]),
        (None, "backhaul", 100, []),
        (0.6, "backhaul", 100, ["a"]),
        (0.0, "vllm", 100, ["a", "b", "c"]),
        (1.0, "vllm", 10, []),
        (0.1, "vllm", None, []),
    ],
)
async def test_share_goes_by_setting_kind_and_what_the_engine_has(
    pool: Pool, share: float | None, kind: Any, num_blocks: int | None, released: list[str]
) -> None:
    for engine in pool.decode:
        engine.known.forget()
        engine.known.found(Capabilities(kind=kind, num_blocks=num_blocks))
    parts = Parts(pool, share=share)
    for key in ("a", "b", "c"):
        parts.save(key, 30)
    await parts.settle()
    assert parts.released.names == released


async def test_memory_is_bounded(pool: Pool) -> None:
    parts = Parts(pool, share=0.9, limit=10)
    for number in range(30):
        parts.save(str(number), 1)
    assert parts.holdings.num_held == 10
    assert parts.gauge() == 10


async def test_nothing_is_remembered_of_engines_without_a_limit(pool: Pool) -> None:
    parts = Parts(pool, share=1.0)
    parts.save("c", 30)
    assert (parts.holdings.num_held, parts.gauge()) == (0, 0)


async def test_many_are_taken_in_batches(parts: Parts) -> None:
    for number in range(50):
        parts.save(str(number), 1)
    parts.save("large", 50)
    await parts.settle()
    assert len(parts.released.names) == 50
    assert parts.shelf.most_at_once == BATCH


async def test_engine_of_another_router_is_none_of_its_business(parts: Parts) -> None:
    parts.save("a", 90, url="http://elsewhere")
    assert parts.holdings.num_held == 0

"""What the sweeper remembers, and for how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from connectors.wire.transfer import KVTransferParams
from router.store import Store
from router.sweep import BATCH, LEAD_SECONDS, Sweeper


class Shelf:
    """A store of offers by key and stamp that says who asked."""

    def __init__(self) -> None:
        self.offers: dict[tuple[str, bytes], KVTransferParams] = {}
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0

    async def take_offer(self, key: str, stamp: bytes) -> KVTransferParams | None:
        self.asked.append(key)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return self.offers.pop((key, stamp), None)

    def put(self, key: str, stamp: bytes = b"1") -> None:
        self.offers[key, stamp] = KVTransferParams(remote_request_id=key)


class Engine:
    def __init__(self) -> None:
        self.released: list[str | None] = []
        self.error: Exception | None = None

    async def release(self, offer: KVTransferParams) -> None:
        self.released.append(offer.remote_request_id)
        if self.error is not None:
            raise self.error


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@asynccontextmanager
async def sweeping(shelf: Shelf, engine: Engine, **settings: Any) -> AsyncIterator[Sweeper]:
    sweeper = Sweeper(cast(Store, shelf), engine.release, **settings)
    sweeper.start()
    try:
        yield sweeper
    finally:
        await sweeper.close()


async def idle(sweeper: Sweeper) -> None:
    """Everything that is due has been looked at."""
    deadline = time.monotonic() + 5
    while sweeper.num_watched:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    for _ in range(10):
        await asyncio.sleep(0)


def soon(seconds: float = 0.0) -> float:
    return time.time() + LEAD_SECONDS + seconds


async def test_unclaimed_offer_is_released_before_its_deadline(shelf: Shelf, engine: Engine) -> None:
    async with sweeping(shelf, engine) as sweeper:
        shelf.put("a")
        deadline = soon(0.1)
        sweeper.watch("a", b"1", deadline)
        await idle(sweeper)
        assert time.time() < deadline
    assert engine.released == ["a"]


async def test_claimed_offer_is_not_released(shelf: Shelf, engine: Engine) -> None:
    async with sweeping(shelf, engine) as sweeper:
        sweeper.watch("a", b"1", soon())
        await idle(sweeper)
    assert (shelf.asked, engine.released) == (["a"], [])


async def test_earlier_deadline_is_not_slept_over(
    shelf: Shelf, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sweep.LOOK_SECONDS", 60.0)
    async with sweeping(shelf, engine) as sweeper:
        sweeper.watch("late", b"1", soon(3600))
        await asyncio.sleep(0)
        for key in ("c", "b", "a"):
            shelf.put(key)
        sweeper.watch("c", b"1", soon(0.06))
        sweeper.watch("a", b"1", soon(0.0))
        sweeper.watch("b", b"1", soon(0.03))
        deadline = time.monotonic() + 5
        while len(engine.released) < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert sweeper.num_watched == 1
    assert engine.released == ["a", "b", "c"]


async def test_conversation_that_goes_on_is_asked_for_once(shelf: Shelf, engine: Engine) -> None:
    async with sweeping(shelf, engine) as sweeper:
        for turn in range(10):
            sweeper.watch("a", bytes([turn]), soon(0.05))
        shelf.put("a", bytes([9]))
        assert sweeper.num_watched == 1
        await idle(sweeper)
    assert (shelf.asked, engine.released) == (["a"], ["a"])


async def test_oldest_are_dropped_beyond_the_limit(shelf: Shelf, engine: Engine) -> None:
    async with sweeping(shelf, engine, limit=10) as sweeper:
        for number in range(30):
            shelf.put(str(number))
            sweeper.watch(str(number), b"1", soon(0.1 + number / 1000))
        assert sweeper.num_watched == 10
        await idle(sweeper)
    assert engine.released == [str(number) for number in range(20, 30)]


async def test_many_at_a_time_are_looked_at_in_batches(shelf: Shelf, engine: Engine) -> None:
    async with sweeping(shelf, engine) as sweeper:
        for number in range(5 * BATCH):
            shelf.put(str(number))
            sweeper.watch(str(number), b"1", soon(-1))
        await idle(sweeper)
    assert len(engine.released) == 5 * BATCH
    assert shelf.most_at_once == BATCH


async def test_engine_that_is_gone_does_not_stop_it(shelf: Shelf, engine: Engine) -> None:
    async with sweeping(shelf, engine) as sweeper:
        engine.error = ConnectionRefusedError()
        for key in ("a", "b"):
            shelf.put(key)
            sweeper.watch(key, b"1", soon())
            await idle(sweeper)
    assert engine.released == ["a", "b"]


async def test_close_ends_it_in_the_middle(shelf: Shelf, engine: Engine) -> None:
    begun = asyncio.Event()

    async def release(_: KVTransferParams) -> None:
        begun.set()
        await asyncio.Event().wait()

    sweeper = Sweeper(cast(Store, shelf), release)
    await sweeper.close()
    sweeper.start()
    shelf.put("a")
    sweeper.watch("a", b"1", soon())
    await begun.wait()
    await sweeper.close()
    assert sweeper._task is not None
    assert sweeper._task.cancelled()

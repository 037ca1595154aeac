"""Room in a pool, who waits for it, and who is refused."""

from __future__ import annotations

import asyncio
import random

import pytest

from connectors.wire.openai import APIError
from router.admission import Gate
from router.member import Engine


async def engines(number: int) -> tuple[Engine, ...]:
    made = tuple(Engine(f"http://10.0.0.{n}:1", "decode") for n in range(1, number + 1))
    for engine in made:
        engine.heard({"m": {"id": "m"}})
    return made


def later(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_without_a_limit_nobody_waits() -> None:
    gate = Gate("decode", tuple, per_engine=None, most_waiting=0)
    for _ in range(100):
        await gate.enter(0, later())
    for _ in range(100):
        gate.leave()
    assert (gate.num_inside, gate.num_waiting) == (0, 0)


async def test_lowest_priority_goes_first_then_who_came_first() -> None:
    two = await engines(1)
    gate = Gate("decode", lambda: two, per_engine=1, most_waiting=10)
    await gate.enter(0, later())
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        await gate.enter(priority, later())
        order.append(name)
        gate.leave()

    tasks = []
    for name, priority in (("b1", 0), ("c", 5), ("b2", 0), ("a", -3)):
        tasks.append(asyncio.create_task(wait(name, priority)))
        await settle()
    assert gate.num_waiting == 4
    gate.leave()
    await asyncio.gather(*tasks)
    assert order == ["a", "b1", "b2", "c"]
    assert (gate.num_inside, gate.num_waiting) == (0, 0)


async def test_room_follows_the_engines_that_take_turns() -> None:
    two = await engines(2)
    gate = Gate("decode", lambda: two, per_engine=2, most_waiting=10)
    assert gate.room == 4
    two[0].lost("connection refused")
    assert gate.room == 2
    for _ in range(2):
        await gate.enter(0, later())
    waiting = asyncio.create_task(gate.enter(0, later()))
    await settle()
    assert gate.num_waiting == 1
    two[0].heard({"m": {"id": "m"}})
    gate.let_in()
    await waiting
    assert gate.num_inside == 3


async def test_full_queue_and_long_wait_are_503_with_retry_after() -> None:
    one = await engines(1)
    gate = Gate("decode", lambda: one, per_engine=1, most_waiting=1)
    await gate.enter(0, later())
    waiting = asyncio.create_task(gate.enter(0, later(0.01)))
    await settle()
    for work in (gate.enter(0, later()), waiting):
        with pytest.raises(APIError) as refused:
            await work
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
    assert gate.num_waiting == 0


async def test_storm_of_cancelled_and_late_ones_leaves_nothing() -> None:
    two = await engines(2)
    gate = Gate("decode", lambda: two, per_engine=3, most_waiting=50)
    chooser = random.Random(11)
    most = 0

    async def one() -> None:
        nonlocal most
        await gate.enter(chooser.randrange(3), later(chooser.choice([0.0, 0.005, 60.0])))
        try:
            most = max(most, gate.num_inside)
            await asyncio.sleep(chooser.random() * 0.003)
        finally:
            gate.leave()

    for _ in range(20):
        tasks = [asyncio.create_task(one()) for _ in range(80)]
        await asyncio.sleep(0.001)
        for task in chooser.sample(tasks, 25):
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, (APIError, asyncio.CancelledError))
        assert (gate.num_inside, gate.num_waiting) == (0, 0)
    assert most == 6

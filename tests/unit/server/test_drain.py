"""How a worker leaves: what holds it up, what does not, and what is still answered meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from engine.drain import drain_when_told
from tests.unit.server.double import ENGINE_ID, Stage, eventually, says

LEASE = {"engine_id": ENGINE_ID, "request_id": "r"}
HEADROOM = 5.0


def leave(stage: Stage, *, timeout: float = 60.0) -> asyncio.Task[None]:
    """Tell the worker to leave; the task ends when its engine's loop has been told to end."""
    stage.worker.config = stage.worker.config.model_copy(update={"drain_timeout": timeout})
    stage.worker.leaving.set()
    return asyncio.create_task(drain_when_told(stage.worker, stage.serving))


async def is_held_up(task: asyncio.Task[None]) -> bool:
    """Whether it still waits when it has looked several times."""
    done, _ = await asyncio.wait([task], timeout=0.2)
    return not done


async def test_nothing_happens_before_it_is_told(stage: Stage) -> None:
    task = asyncio.create_task(drain_when_told(stage.worker, stage.serving))
    assert await is_held_up(task)
    assert (await stage.chat())[0] == 200
    stage.worker.leaving.set()
    await asyncio.wait_for(task, HEADROOM)
    assert (await stage.session.get("/health")).status == 503
    status, answer = await stage.chat()
    assert (status, "shutting down" in answer["error"]["message"]) == (503, True)


async def test_what_runs_ends_and_what_comes_is_refused(stage: Stage) -> None:
    stage.script = lambda request: []
    running = asyncio.create_task(stage.chat())
    await eventually(lambda: len(stage.submitted) == 1)
    task = leave(stage)
    assert await is_held_up(task)
    async with stage.session.post("/v1/completions", json={"prompt": "a"}) as late:
        assert (late.status, int(late.headers["Retry-After"]) >= 1) == (503, True)
    for output in says("hello")(stage.submitted[0]):
        stage.client.emit([output])
    assert (await running)[1]["choices"][0]["finish_reason"] == "length"
    await asyncio.wait_for(task, HEADROOM)


@pytest.mark.parametrize("end", ["read", "run out"])
async def test_handed_over_blocks_are_waited_for_and_may_be_read(prefill: Stage, end: str) -> None:
    prefill.leases.hold("r", [1], ["aa"], 30)
    task = leave(prefill)
    assert await is_held_up(task)
    assert await prefill.post("/kv/renew", {"engine_id": ENGINE_ID, "request_ids": ["r"]}) == (200, {"renewed": 1})
    if end == "read":
        assert (await prefill.post("/kv/claim", LEASE))[0] == 200
        assert await is_held_up(task)
        prefill.leases.release("r")
    else:
        prefill.leases.expire(time.monotonic() + 31)
    await asyncio.wait_for(task, HEADROOM)


async def test_handed_over_blocks_that_are_given_back_hold_nothing_up(prefill: Stage) -> None:
    prefill.leases.hold("r", [1], ["aa"], 30)
    task = leave(prefill)
    assert await prefill.post("/kv/release", LEASE) == (200, {"released": True})
    await eventually(lambda: bool(prefill.other))
    prefill.leases.release("r")  # what the engine does with that message
    await asyncio.wait_for(task, HEADROOM)


async def test_offers_to_a_next_turn_hold_nothing_up(decode: Stage) -> None:
    decode.leases.hold("r", [1], ["aa"], 480, revocable=True)
    await asyncio.wait_for(leave(decode), HEADROOM)


async def test_offer_that_is_being_read_does(decode: Stage) -> None:
    decode.leases.hold("r", [1], ["aa"], 480, revocable=True)
    assert (await decode.post("/kv/claim", LEASE))[0] == 200
    task = leave(decode)
    assert await is_held_up(task)
    decode.leases.release("r")
    await asyncio.wait_for(task, HEADROOM)


async def test_neither_requests_nor_readers_are_waited_for_for_ever(
    prefill: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.script = lambda request: []
    running = asyncio.create_task(prefill.chat())
    await eventually(lambda: len(prefill.submitted) == 1)
    prefill.leases.hold("r", [1], ["aa"], 30)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(leave(prefill, timeout=0.1), HEADROOM)
    (record,) = [record for record in caplog.records if "drain timeout" in record.getMessage()]
    assert (record.requests, record.leases) == (1, 1)  # type: ignore[attr-defined]
    running.cancel()


async def test_prompt_that_is_ready_only_when_the_engine_is_gone_is_refused(stage: Stage) -> None:
    """The request was taken in before; it must not wait for a loop that has ended."""
    stage.client.close()
    status, answer = await stage.chat()
    assert (status, "shutting down" in answer["error"]["message"]) == (503, True)
    assert stage.submitted == []


async def test_engine_whose_transport_broke_ends_what_runs_and_waits_for_no_reader(prefill: Stage) -> None:
    prefill.leases.hold("r", [1], ["aa"], 30)
    prefill.script = lambda request: []
    running = asyncio.create_task(prefill.chat())
    await eventually(lambda: len(prefill.submitted) == 1)
    task = asyncio.create_task(drain_when_told(prefill.worker, prefill.serving))
    prefill.transport.failed = True
    assert (await prefill.session.get("/health")).status == 503
    for reason in ("KV can no longer be exchanged", "later"):
        prefill.worker.fail(reason)
    assert await is_held_up(task)
    for output in says("hello")(prefill.submitted[0]):
        prefill.client.emit([output])
    assert (await running)[0] == 200
    await asyncio.wait_for(task, HEADROOM)
    assert prefill.worker.failure == "KV can no longer be exchanged"


async def test_engine_whose_loop_died_is_not_healthy(tiny_model: Path) -> None:
    async with Stage(tiny_model) as stage:
        stage.client.fail("the engine failed")
        assert (await stage.session.get("/health")).status == 503
        status, answer = await stage.chat()
        assert (status, "shutting down" in answer["error"]["message"]) == (503, True)

"""A store over a server that a test has, and what to put into it."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from connectors.wire.transfer import KVTransferParams
from router.metrics import Metrics
from router.record import Record
from router.store import Store


def record(turn: int = 1, seconds: float = 60.0, ids: tuple[int, ...] = (1, 2, 70_000)) -> Record:
    return Record(
        turn=turn,
        prefill="http://p",
        decode="http://d",
        deadline=time.time() + seconds,
        token_ids=array("I", ids),
    )


def offer(name: str = "request", num_blocks: int = 2, **more: Any) -> KVTransferParams:
    """What a decode engine says of the blocks of `name`."""
    return KVTransferParams(
        do_remote_decode=True,
        do_remote_prefill=False,
        remote_block_ids=[[7 * block for block in range(num_blocks)]],
        remote_block_hashes=[f"{block:032x}" for block in range(num_blocks)],
        remote_num_tokens=16 * num_blocks - 1,
        remote_block_size=16,
        remote_engine_id="d",
        remote_request_id=name,
        remote_host="127.0.0.1",
        remote_port=1234,
        kv_layout="layout",
        **more,
    )


def names(offers: tuple[KVTransferParams, ...]) -> list[str | None]:
    return [one.remote_request_id for one in offers]


@asynccontextmanager
async def store_at(url: str, *, seconds: float = 5.0, **settings: Any) -> AsyncIterator[Store]:
    """With a long timeout unless a test is about it: the machine that runs the tests may be busy."""
    settings.setdefault("metrics", Metrics(["chat"]))
    store = Store(url, timeout=seconds, **settings)
    try:
        yield store
    finally:
        await store.close()


def count(metrics: Metrics, op: str, result: str) -> float:
    labels = {"op": op, "result": result}
    return metrics.registry.get_sample_value("backhaul_router_store_operations_total", labels) or 0.0


async def eventually(condition: Callable[[], Awaitable[object]], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)

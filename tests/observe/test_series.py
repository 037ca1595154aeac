"""How many series there are does not depend on what clients send."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from router.metrics import Metrics
from router.tally import MAX_MODELS, OTHER, Counts
from router.totals import Totals, read, snapshot
from tests.router_harness import router_over
from tests.stub_engine import StubEngine
from tests.unit.server.double import Stage

NUM_REQUESTS = 5000
AT_ONCE = 20
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models/", "/metrics/", "/kv/", "/")


def series(text: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


def made_up(seed: int) -> Iterator[dict[str, Any]]:
    """Requests that have little in common."""
    rng = random.Random(seed)

    def word() -> str:
        return f"{rng.getrandbits(64):x}"

    for _ in range(NUM_REQUESTS):
        body: dict[str, Any] = {
            "model": rng.choice(("m", "tiny", word())),
            "messages": [{"role": "user", "content": word()}],
            "prompt": word(),
            "input": word(),
            "stream": rng.random() < 0.5,
            "max_tokens": 3,
            "user": word(),
            "conversation_id": word(),
        }
        path = rng.choice(PATHS)
        yield {
            "method": rng.choice(METHODS) if rng.random() < 0.5 else "POST",
            "path": path + word() if path.endswith("/") or rng.random() < 0.1 else path,
            "data": json.dumps(body) if rng.random() < 0.9 else word(),
            "headers": {"X-Request-Id": word(), "Authorization": word(), word(): word(), "User-Agent": word()},
        }


async def send_all(url: str, client: aiohttp.ClientSession, seed: int) -> set[int]:
    requests, statuses = made_up(seed), set()

    async def work() -> None:
        for one in requests:
            path = one.pop("path")
            async with client.request(one.pop("method"), url + path, **one) as answer:
                await answer.read()
                statuses.add(answer.status)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return statuses


async def text_of(url: str, client: aiohttp.ClientSession) -> str:
    async with client.get(url + "/metrics") as answer:
        return await answer.text()


async def test_requests_of_any_kind_make_no_series_of_the_router(p: StubEngine, d: StubEngine, store: str) -> None:
    async with router_over([p], [d], store) as front:
        before = series(await text_of(front.url, front.client))
        statuses = await send_all(front.url, front.client, seed=1)
        after = series(await text_of(front.url, front.client))
    assert {200, 400, 404, 405} <= statuses
    assert 500 not in statuses
    new = [name for name in after - before if 'model="' in name and 'model="m"' not in name]
    assert not new
    assert len(after) < len(before) + 250, "what is there once each endpoint, phase and result was seen"


async def test_requests_of_any_kind_make_no_series_of_the_engine(tiny_model: Path) -> None:
    async with Stage(tiny_model) as stage, aiohttp.ClientSession() as client:
        before = series(await text_of(stage.url, client))
        statuses = await send_all(stage.url, client, seed=2)
        after = series(await text_of(stage.url, client))
    assert {200, 400, 404, 405} <= statuses
    assert 500 not in statuses
    assert after == before


def test_models_beyond_a_hundred_are_one() -> None:
    metrics = Metrics(["chat"])
    for number in range(10 * MAX_MODELS):
        metrics.piece_seconds.observe(metrics.model(f"adapter-{number}"), 0.01)
    [family] = metrics.piece_seconds.collect()
    models = {sample.labels["model"] for sample in family.samples}
    assert len(models) == MAX_MODELS + 1
    assert OTHER in models


def counted(**counts: float) -> bytes:
    """The snapshot of a process that has counted these by model."""
    registry = CollectorRegistry()
    metric = Counts("turns", "Turns.", ["model"], registry=registry)
    for model, count in counts.items():
        metric.add(model, by=count)
    return snapshot(registry)


def test_models_of_many_processes_are_bounded_as_well() -> None:
    totals = Totals()
    for process in range(10):
        totals.bury(read(counted(**{f"p{process}m{number}": 1.0 for number in range(MAX_MODELS)})))
        [family] = totals.collect()
        sums = {sample.labels["model"]: sample.value for sample in family.samples}
        assert sum(sums.values()) == MAX_MODELS * (process + 1)
        assert len(sums) <= MAX_MODELS + 1
    assert sums[OTHER] == 9 * MAX_MODELS

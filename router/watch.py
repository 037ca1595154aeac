"""Looks at every engine, again and again: whether it is up, what it serves and can do, how busy it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import orjson

from router import load
from router.background import must_go_on
from router.client import Client
from router.client_protocol import ClientError, ConnectFailed, ConnectTimeout, Disconnected, Exhausted
from router.faults import LEAVING
from router.member import Engine
from router.pool import Pool
from router.probe import Probe, kind_of

FIRST_RETRY_SECONDS: Final = 0.1
LEAST_SECONDS: Final = 0.1
"""Between two looks, whoever is in doubt."""
MAX_CARDS_BYTES: Final = 16 << 20

log = logging.getLogger("router.pool")


class Watch:
    """Every engine of a pool has a task of its own that looks at it, from when it joins until it leaves."""

    def __init__(self, pool: Pool, client: Client, *, interval: float, timeout: float) -> None:
        """Seconds between two looks at an engine that is well, and for each question."""
        self.pool = pool
        self._client = client
        self._interval = interval
        self._timeout = timeout
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def start(self) -> None:
        self.pool.on_join.append(self._joined)
        self.pool.on_leave.append(self._left)
        self._client.on_lost = self.pool.doubt
        for engine in self.pool.engines:
            self._joined(engine)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _joined(self, engine: Engine) -> None:
        task = self._tasks[engine] = asyncio.create_task(self._watch(engine), name=f"watch {engine.name}")
        must_go_on(task, "an engine is no longer watched")

    def _left(self, engine: Engine) -> None:
        if not engine.in_flight:
            self._tasks.pop(engine).cancel()

    async def _watch(self, engine: Engine) -> None:
        """Soon again where it is not well, less and less often, but no less than where it is. One that has left is
        looked at as long as it has requests: they should not wait for one that is dead."""
        delay, least = FIRST_RETRY_SECONDS, LEAST_SECONDS
        while not engine.is_gone or engine.in_flight:
            engine.doubt.clear()
            await self.look(engine)
            well = engine.health == "ready" and not engine.looks_missed
            delay = self._interval if well else min(2 * delay, self._interval)
            try:
                async with asyncio.timeout(delay):
                    await asyncio.sleep(least)
                    await engine.doubt.wait()
                delay = FIRST_RETRY_SECONDS
                least = min(2 * least, self._interval) if well else LEAST_SECONDS  # for no reason, again and again
            except TimeoutError:
                least = LEAST_SECONDS
        self._tasks.pop(engine, None)

    async def look(self, engine: Engine) -> None:
        """Have it list its models. Raises nothing."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._timeout):
                with await self._client.request("GET", f"{engine.url}/v1/models", engine.headers) as answer:
                    text = await answer.read(MAX_CARDS_BYTES)
                    if answer.status != 200:
                        return _refused(engine, answer.status, text, began)
                    models = _cards(text)
        except (ClientError, TimeoutError, ValueError) as error:
            if isinstance(error, ConnectFailed) and not isinstance(error, ConnectTimeout):
                engine.lost("connection refused")
                engine.missed("connection refused", began)  # what waits for it may not have been told
                engine.doubt.clear()
            elif isinstance(error, Exhausted):
                log.warning("engines are not looked at", extra={"why": str(error)})
            else:
                engine.missed(type(error).__name__, began)
        else:
            await self._discover(engine, models)
            engine.heard(models)
            await self._weigh(engine)
        return None

    async def _discover(self, engine: Engine, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Find out what it can do, where it may be another engine than at the last look."""
        known = engine.known
        if engine.health == "ejected":
            known.forget()
        if known.stale or engine.looks_missed or engine.health != "ready" or models.keys() != engine.models.keys():
            probe = Probe(self._client, engine.url, engine.headers, self._timeout)
            only_prefills = engine.role == "prefill" and all(one.url != engine.url for one in self.pool.decode)
            found = await probe.run(known.stated.kind or kind_of(models), only_prefills=only_prefills)
            known.found(found, complete=probe.is_complete)

    async def _weigh(self, engine: Engine) -> None:
        """Find out how busy it is, where there is a choice, or somebody looks. One that does not say is as busy as we
        make it."""
        if len(self.pool.of(engine.role)) < 2 and self.pool.observed_until < asyncio.get_running_loop().time():
            return
        began, ours, text = asyncio.get_running_loop().time(), engine.in_flight, b""
        try:
            async with asyncio.timeout(self._timeout):
                with await self._client.request("GET", f"{engine.url}/metrics", engine.headers) as answer:
                    if answer.status == 200:
                        text = await answer.read(load.MAX_BYTES)
        except (ConnectFailed, Disconnected):
            engine.doubt.set()  # it may have ended just now
        except (ClientError, TimeoutError):
            pass
        engine.reported = load.read_load(text, ours=ours)
        if engine.reported.started:
            engine.process, engine.process_seen_at = engine.reported.started, began


def _refused(engine: Engine, status: int, text: bytes, began: float) -> None:
    if status == 503 and LEAVING.encode() in text:
        engine.leaves()
    elif status == 503 and engine.health == "joining":
        engine.tell("not ready yet")
    else:
        engine.missed(f"status {status} for /v1/models", began)


def _cards(body: bytes) -> dict[str, Mapping[str, Any]]:
    """The model cards of a `/v1/models` answer. Raises ValueError if it is none."""
    answer = orjson.loads(body)
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list) or not all(isinstance(card, dict) and card.get("id") for card in cards):
        raise ValueError("not a list of models")
    return {str(card["id"]): card for card in cards}

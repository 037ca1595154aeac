"""A whole deployment, watched by a real Prometheus: two routers of two processes, four engines, a store; with turns of
every kind, and the death of a process."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.chaos.fleet import Fleet, fleet
from tests.chaos.parts import Part
from tests.observe.prometheus import Prometheus
from tests.tiny import vocabulary

CHAT = "/v1/chat/completions"
CONVERSATIONS = 8
TEXT = "What has been computed once should not be computed twice, be it here or elsewhere. "
ANSWER_TOKENS = 40
"""Enough to be pulled for the next turn: nothing but the decode engine has their KV."""
SAID = "!"
"""What the model is made to say, over and over. What it would say by itself is seldom tokenized the same when it comes
back, and then there is next to nothing to pull."""
PATIENCE_SECONDS = 60.0


@dataclass
class Watched:
    prometheus: Prometheus
    answered: Counter[str] = field(default_factory=Counter)
    """Turns by how they ended for the client."""
    at: float = 0.0
    """When all was done, and everything ran."""
    expositions: dict[str, bytes] = field(default_factory=dict)


async def play(model: Path, folder: Path, watch: Callable[[dict[str, list[str]]], Prometheus]) -> Watched:
    """`watch` starts Prometheus over these addresses, by job."""
    async with fleet(model, folder, sentinel=False, trouble=False, processes=2) as started:
        jobs = {
            "routers": [_address(part) for part in started.routers],
            "prefill": [_address(part) for part in started.group("prefill")],
            "decode": [_address(part) for part in started.group("decode")],
        }
        watched = Watched(await asyncio.to_thread(watch, jobs))
        await _scraped(watched.prometheus, sum(map(len, jobs.values())))
        await _talk(started, watched.answered)
        await _go_wrong(started, watched.answered)
        await _scraped(watched.prometheus, sum(map(len, jobs.values())))
        await _kill_one_process(started.routers[0])
        await _talk(started, watched.answered)
        watched.at = await _scraped(watched.prometheus, sum(map(len, jobs.values())))
        for part in (started.routers[0], started.group("prefill")[0], started.group("decode")[0]):
            async with started.client.get(f"{part.url}/metrics") as answer:
                watched.expositions[part.group] = await answer.read()
    return watched


async def _scraped(server: Prometheus, num: int) -> float:
    """When all of so many were scraped, with what has been counted until now."""
    begin = time.time()
    query = f"count(up == 1 and timestamp(up) > {begin:.3f})"

    async def all_are() -> bool:
        counted = await asyncio.to_thread(server.query, query)
        return bool(counted) and float(counted[0]["value"][1]) == num

    await _until(all_are)
    return time.time()


def _address(part: Part) -> str:
    return part.url.removeprefix("http://")


async def _talk(started: Fleet, answered: Counter[str]) -> None:
    """Conversations of two turns: the second pulls what the first has left."""

    async def converse(number: int) -> None:
        name = f"conversation {sum(answered.values())} {number}"
        messages = [{"role": "user", "content": f"{number} {TEXT}"}]
        for turn in range(2):
            router = started.routers[(number + turn) % 2]
            body = {
                "model": "tiny",
                "messages": messages,
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "allowed_token_ids": [vocabulary()[0].index(SAID)],
                "stream": turn % 2 == 0,
            }
            headers = {"X-Conversation-Id": name, "Connection": "close"}
            async with started.client.post(router.url + CHAT, json=body, headers=headers) as answer:
                text = await answer.text()
                assert answer.status == 200, text
            said = _said(text)
            assert said == SAID * ANSWER_TOKENS
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": TEXT}]
            answered["ok"] += 1

    await asyncio.gather(*(converse(number) for number in range(CONVERSATIONS)))


def _said(text: str) -> str:
    if not text.startswith("data:"):
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def _go_wrong(started: Fleet, answered: Counter[str]) -> None:
    """A model that nobody has, an abort, and a client that leaves."""
    router = started.routers[1]
    long: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 250,
        "ignore_eos": True,
        "stream": True,
    }
    async with started.client.post(router.url + CHAT, json=long | {"model": "nobody's"}) as answer:
        assert answer.status == 404
        answered["rejected"] += 1
    headers = {"X-Request-Id": "to-be-aborted"}
    async with started.client.post(router.url + CHAT, json=long, headers=headers) as answer:
        await answer.content.readany()
        abort = {"request_ids": ["to-be-aborted"]}
        async with started.client.post(router.url + "/inference/v1/abort_requests", json=abort) as told:
            assert (await told.json())["aborted"] == 1
        await answer.read()
        answered["aborted"] += 1
    async with aiohttp.ClientSession() as leaving, leaving.post(router.url + CHAT, json=long) as answer:
        await answer.content.readany()
        answer.close()
        answered["client_gone"] += 1
    await _until(lambda: _all(started, "backhaul_router_turns_in_flight", lambda value: value == 0))


async def _kill_one_process(router: Part) -> None:
    assert router.process is not None
    psutil.Process(router.process.pid).children()[0].kill()
    async with aiohttp.ClientSession() as client:

        async def is_whole() -> bool:
            try:
                async with client.get(f"{router.url}/metrics", headers={"Connection": "close"}) as answer:
                    text = await answer.text()
                async with client.get(f"{router.url}/ready", headers={"Connection": "close"}) as answer:
                    return "backhaul_router_processes 2.0" in text and answer.status == 200
            except aiohttp.ClientError:
                return False

        for _ in range(4):  # either process may have been asked
            await _until(is_whole)


async def _all(started: Fleet, name: str, holds: Callable[[float], bool]) -> bool:
    return all([holds((await started.metrics(part))[name]) for part in started.routers])


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():  # noqa: ASYNC110 (it happens elsewhere)
            await asyncio.sleep(0.05)

"""What conversations and streams cost a router in memory.

    python -m bench.held [--conversations 10000] [--streams 500]

A real router over stub engines that stream slowly. Conversations have had their first turn, and then do nothing: their
state is in Redis. Streams are all open at the same time. Goals: nothing per idle conversation; per stream it is stated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any, Final

import aiohttp
import psutil

from bench.router_parts import Parts, running_parts
from bench.stack import provenance

AT_ONCE: Final = 64
CHUNKS: Final = 400
INTERVAL_US: Final = 50_000
ROUNDS: Final = 3
"""Of the same conversations: what a process takes once and keeps is taken in the first."""


def body(number: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Hello number {number}. " + "word " * 200}]
    return {"model": "stub", "messages": messages, "stream": stream, "conversation_id": f"c{number}"}


async def turns(session: aiohttp.ClientSession, url: str, numbers: range) -> None:
    """The first turn of each of these conversations."""
    todo = iter(numbers)

    async def work() -> None:
        for number in todo:
            data = json.dumps(body(number, stream=False))
            async with session.post(f"{url}/v1/chat/completions", data=data) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def open_stream(session: aiohttp.ClientSession, url: str, number: int) -> aiohttp.ClientResponse:
    answer = await session.post(f"{url}/v1/chat/completions", data=json.dumps(body(number, stream=True)))
    assert answer.status == 200, await answer.text()
    await answer.content.readany()
    return answer


async def measure(parts: Parts, conversations: int, streams: int) -> dict[str, float]:
    url = parts.sides["backhaul"].url
    memory = psutil.Process(parts.sides["backhaul"].child.pid).memory_info
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        found: dict[str, float] = {"at the start, MiB": memory().rss / 2**20}
        await turns(session, url, range(500))
        for number in range(ROUNDS):
            before = memory().rss
            first = 1000 + number * conversations
            await turns(session, url, range(first, first + conversations))
            await asyncio.sleep(1)
            found[f"{conversations} more conversations, bytes each"] = (memory().rss - before) / conversations
        before = memory().rss
        answers = await asyncio.gather(*(open_stream(session, url, number) for number in range(streams)))
        await asyncio.sleep(1)
        found[f"{streams} open streams, KiB each"] = (memory().rss - before) / streams / 1024
        found["with them, MiB"] = memory().rss / 2**20
        texts = await asyncio.gather(*(answer.content.read() for answer in answers))
        assert all(b"[DONE]" in text for text in texts)
        await asyncio.sleep(1)
        found["after them, MiB"] = memory().rss / 2**20
    return found


async def run(args: argparse.Namespace) -> None:
    async with running_parts(chunks=CHUNKS, interval_us=INTERVAL_US) as parts:
        found = await measure(parts, args.conversations, args.streams)
    print(provenance())
    for name, value in found.items():
        print(f"{name:>45} {value:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=500)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""Blocks of a real vLLM decode engine that nobody will read are free as soon as its router knows."""

from __future__ import annotations

import asyncio

import aiohttp

from bench.chat import scrape
from tests.interop.conftest import Fleet
from tests.interop.engines import BLOCK_SIZE, MODEL, VLLM
from tests.interop.routers import RouterProcess
from tests.interop.talk import body_of, client, whole

NUM_WORDS = 300
SECONDS = 60.0
"""For a release; without one the blocks would be there for `VLLM.offer_seconds`, which is more."""


async def num_held(session: aiohttp.ClientSession, engine: VLLM, num_blocks: int) -> int:
    """Blocks that the engine has in use. It counts when it has something to do."""
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
    async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
        assert answer.status == 200
    await asyncio.sleep(0.5)
    return round((await scrape(session, engine.url))["vllm:kv_cache_usage_perc"] * num_blocks)


async def test_conversation_begun_anew_leaves_no_blocks_behind(fleet: Fleet, router: RouterProcess) -> None:
    words = " ".join(f"word{number}" for number in range(NUM_WORDS))
    loop = asyncio.get_running_loop()
    async with client() as session, session.get(f"{router.url}/admin/status") as answer:
        engines = (await answer.json())["engines"]
        num_blocks = next(e for e in engines if e["role"] == "decode")["capabilities"]["num_blocks"]["value"]
        before = await num_held(session, fleet.decode, num_blocks)
        prompt_tokens = 0
        for number in range(3):
            started = loop.time()
            body = body_of([{"role": "user", "content": f"{number} {words}"}], conversation_id="begun anew")
            prompt_tokens = (await whole(session, router.url, body))["usage"]["prompt_tokens"]
        own = -(-prompt_tokens // BLOCK_SIZE) + 1
        while (held := await num_held(session, fleet.decode, num_blocks)) > before + own:
            assert loop.time() - started < SECONDS, f"{held} blocks are held, of one turn {own}"
        released = (await scrape(session, router.url))["backhaul_router_kv_releases_total"]
        assert released >= 2

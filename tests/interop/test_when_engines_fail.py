"""What may happen to real vLLM engines between two turns of a conversation: the next answer is right all the same.

The last of these tests to run, by their files' names: they end the decode engine that all share.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.histories import asked, told
from tests.interop.conftest import Fleet
from tests.interop.engines import VLLM
from tests.interop.routers import RouterProcess
from tests.interop.talk import Talker, client

OFFER_SECONDS = 8.0
MARGIN_SECONDS = 5.0
"""vLLM lets nobody begin to read so shortly before the blocks are freed."""


@pytest.fixture(scope="module")
def short_lived(fleet: Fleet) -> Iterator[VLLM]:
    """The decode engine, started again in the middle of a conversation; it then keeps its blocks for seconds only."""
    engine = replace(fleet.decode, offer_seconds=OFFER_SECONDS, process=None)
    try:
        yield engine
    finally:
        engine.kill()


async def test_decode_engine_started_again_between_turns(
    fleet: Fleet, router: RouterProcess, short_lived: VLLM
) -> None:
    chooser = random.Random("restart")
    async with client() as session:
        talker = Talker(session, router.url, fleet.truth.url, stream=False)
        messages = [told(chooser, "Anna")]
        messages.append({"role": "assistant", "content": await talker.say(messages)})
        fleet.decode.kill()
        async with session.post(
            router.url + "/v1/chat/completions", json={"model": "smollm2", "messages": [told(chooser, "Boris")]}
        ) as answer:
            assert answer.status == 503
            assert "Retry-After" in answer.headers
        short_lived.start()
        await asyncio.to_thread(short_lived.wait)
        await asyncio.to_thread(router.wait)
        for _ in range(2):
            messages.append(asked(chooser))
            messages.append({"role": "assistant", "content": await talker.say(messages)})


async def test_blocks_whose_time_is_over_are_not_waited_for(
    fleet: Fleet, router: RouterProcess, short_lived: VLLM
) -> None:
    if short_lived.process is None:
        pytest.skip("needs the decode engine that the test before has started")
    chooser = random.Random("expired")
    async with client() as session:
        talker = Talker(session, router.url, fleet.truth.url, stream=False)
        messages = [told(chooser, "Clara")]
        messages.append({"role": "assistant", "content": await talker.say(messages)})
        await asyncio.sleep(OFFER_SECONDS)
        messages.append(asked(chooser))
        await talker.say(messages)
    assert "kv=gone" in talker.plans[-1]

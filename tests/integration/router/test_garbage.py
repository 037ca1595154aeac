"""What turns leave in memory: nothing that waits for the garbage collector, but for those that an engine has failed.

One cycle of references would keep all of a turn, its prompt included, until thousands of others have come; the memory
that they then need is not in the processor's caches.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from router.request import Turn
from tests.router_harness import CHAT, COMPLETION, Front, until
from tests.stub_engine import TEXT, StubEngine, refuse

MESSAGES = [{"role": "user", "content": "Hi"}]
LATER = [*MESSAGES, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "and then"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "named": ("/v1/chat/completions", {**CHAT, "conversation_id": "one"}),
    "completion": ("/v1/completions", COMPLETION),
    "several": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "responses": ("/v1/responses", {"model": "m", "input": "Hi"}),
    "generate": ("/inference/v1/generate", {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {}}),
}


async def takes_long(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def nothing_is_left(front: Front) -> None:
    await until(front.is_settled, "the turns have ended")
    await until(lambda: not any(type(one) is Turn for one in gc.get_objects()), "their memory is free")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_turns_leave_no_garbage(front: Front, name: str, stream: bool) -> None:
    path, body = REQUESTS[name]
    for _ in range(3):
        assert (await front.post({**body, "stream": stream}, path=path)).status == 200
    await nothing_is_left(front)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_later_turns_leave_no_garbage(front: Front, stream: bool) -> None:
    for messages in (MESSAGES, LATER, LATER):
        assert (await front.post({**CHAT, "messages": messages, "stream": stream})).status == 200
    await nothing_is_left(front)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_turns_that_an_engine_refuses_leave_no_garbage(
    front: Front, p: StubEngine, d: StubEngine, role: str
) -> None:
    {"prefill": p, "decode": d}[role].scripts.append(refuse(400))
    assert (await front.post(CHAT)).status == 400
    await nothing_is_left(front)


async def test_turns_whose_client_leaves_leave_no_garbage(front: Front, d: StubEngine) -> None:
    d.scripts.append(takes_long)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await front.post(CHAT)
    await nothing_is_left(front)

"""The other side of `bench.turn`: a multi-turn proxy as public ones are today, keyed by conversation id alone.

What it does, on purpose, and no more:

- `conversation_id` finds the decode engine's transfer params of the last turn. They are taken out when used, whatever
  becomes of the request, and sent to the prefill engine as they are: nobody compares tokens.
- Prefill and decode engine are each the next in turn, so that the next turn of a conversation meets other engines.
- Every turn goes through both. The decode engine gets the messages again, and renders and tokenizes them again.

In front of our engines that is safe, since they compare block hashes before they read. They take transfer params only
from who has their key, which it gets too. Streams only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from connectors.wire.seal import SEAL_HEADER, SealKeys

REMEMBERED_SECONDS = 450.0
TIMEOUT = aiohttp.ClientTimeout(total=600)
PATH = "/v1/chat/completions"
NOT_FOR_PREFILL = ("stream_options", "max_completion_tokens", "min_tokens")

Params = dict[str, Any]


class Remembered:
    """conversation id -> the decode engine's params of its last turn. Each entry is used once."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, Params]] = {}

    def pop(self, conversation: str | None) -> Params | None:
        stored, params = self._entries.pop(conversation or "", (0.0, None))
        return params if time.monotonic() - stored <= REMEMBERED_SECONDS else None

    def put(self, conversation: str | None, params: Params) -> None:
        if conversation:
            self._entries[conversation] = (time.monotonic(), params)


class ReferenceProxy:
    def __init__(
        self, session: aiohttp.ClientSession, prefill: Sequence[str], decode: Sequence[str], seals: SealKeys
    ) -> None:
        """The engines' URLs, without /v1, and their key."""
        self._session = session
        self._seals = seals
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._remembered = Remembered()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if not body.get("stream"):
            raise web.HTTPBadRequest(text="This proxy answers streams only.")
        conversation = body.pop("conversation_id", None)
        params = await self._prefill_leg(body, self._remembered.pop(conversation))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self._post(next(self._decode), {**body, "kv_transfer_params": params}) as upstream:
            await response.prepare(request)
            while line := await upstream.content.readline():
                await response.write(line)
                if b'"kv_transfer_params"' in line:
                    self._keep(conversation, line)
        await response.write_eof()
        return response

    async def _prefill_leg(self, body: dict[str, Any], offered: Params | None) -> Params | None:
        """Have the prompt computed; what the prefill engine says about its blocks."""
        leg = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
        leg |= {
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {**(offered or {}), "do_remote_decode": True, "do_remote_prefill": False},
        }
        async with self._post(next(self._prefill), leg) as answer:
            params: Params | None = orjson.loads(await answer.read()).get("kv_transfer_params")
        return params

    @asynccontextmanager
    async def _post(self, engine: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.post(
            engine + PATH,
            data=orjson.dumps(body),
            headers={"Content-Type": "application/json", SEAL_HEADER: self._seals.seal(PATH, body)},
            timeout=TIMEOUT,
        ) as response:
            if response.status != 200:
                raise web.HTTPBadGateway(text=f"{engine} answered {response.status}: {await response.text()}")
            yield response

    def _keep(self, conversation: str | None, line: bytes) -> None:
        params = orjson.loads(line.removeprefix(b"data:")).get("kv_transfer_params")
        if isinstance(params, dict):
            self._remembered.put(conversation, params)


@asynccontextmanager
async def running_reference(
    session: aiohttp.ClientSession, prefill: Sequence[str], decode: Sequence[str], seals: SealKeys
) -> AsyncIterator[str]:
    """The proxy on a free loopback port, in this process; yields its base URL."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post(PATH, ReferenceProxy(session, prefill, decode, seals).chat)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()

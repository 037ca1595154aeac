"""A client of the router that checks every answer against an engine without any cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.chat import Message, scrape, stream_chat
from tests.interop.engines import MODEL

ANSWER_TOKENS = 24
SETTLE_SECONDS = 5.0
COMPUTED, CACHED = "local_compute", "local_cache_hit"
PULLED_BYTES = "vllm:nixl_bytes_transferred_sum"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total:"


def body_of(messages: Sequence[Message], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}


@dataclass
class Talker:
    session: aiohttp.ClientSession
    router: str
    truth: str
    stream: bool
    conversation: str | None = None
    """The name it gives its conversation, if any."""
    plans: list[str] = field(default_factory=list)
    """What the router said of each turn."""
    prompt_tokens: list[int] = field(default_factory=list)

    @property
    def num_offered(self) -> int:
        """Turns whose prefill engine was told where the blocks of the last turn are."""
        return sum("kv=offered" in plan for plan in self.plans)

    async def say(self, messages: list[Message]) -> str:
        """The router's answer. Fails if an engine on its own would have given another."""
        named = {} if self.conversation is None else {"conversation_id": self.conversation}
        text = await self._ask(body_of(messages, **named))
        right = await whole(self.session, self.truth, body_of(messages))
        assert text == right["choices"][0]["message"]["content"], f"{self.conversation}: {self.plans}"
        return text

    async def _ask(self, body: dict[str, Any]) -> str:
        if self.stream:
            reply = await stream_chat(self.session, self.router + "/v1", body)
            self.plans.append(reply.plan)
            self.prompt_tokens.append(reply.prompt_tokens)
            return reply.text
        answer = await whole(self.session, self.router, body, self.plans)
        self.prompt_tokens.append(answer["usage"]["prompt_tokens"])
        return str(answer["choices"][0]["message"]["content"])


async def whole(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], plans: list[str] | None = None
) -> dict[str, Any]:
    async with session.post(f"{url}/v1/chat/completions", json=body, headers={"X-Backhaul-Explain": "1"}) as answer:
        told = await answer.json()
        assert answer.status == 200, told
        if plans is not None:
            plans.append(answer.headers["X-Backhaul-Plan"])
        return dict(told)


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        yield session


async def counted(session: aiohttp.ClientSession, engine: str) -> Counter[str]:
    """Prompt tokens by source, and bytes pulled, once the engine has told all it knows of the last request."""
    last = await scrape(session, engine)
    deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.2)
        now = await scrape(session, engine)
        if _counts(now) == _counts(last):
            break
        last = now
    return _counts(last)


def _counts(metrics: Counter[str]) -> Counter[str]:
    sources = {source: metrics[_BY_SOURCE + source] for source in (COMPUTED, CACHED, "external_kv_transfer")}
    return Counter({**sources, PULLED_BYTES: metrics[PULLED_BYTES]})

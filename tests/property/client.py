"""One request as a client sends it, and its answer, streamed or whole, in one shape."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from connectors.wire import sse

FINISH_REASONS = {"completed": "stop", "incomplete": "length"}
"""By the status of a response."""
USAGE = {
    "prompt_tokens": "input_tokens",
    "completion_tokens": "output_tokens",
    "prompt_tokens_details": "input_tokens_details",
}
"""What a response counts, by the names that the other endpoints have for it."""


class Door(Protocol):
    """Where requests go."""

    @property
    def url(self) -> str: ...

    @property
    def client(self) -> aiohttp.ClientSession: ...


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    """By lower-case name."""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: Any = None
    num_events: int = 0
    ended: bool = False
    """The answer is whole."""
    leaked: bool = False
    """The client saw what is between router and engines."""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def take(self, body: dict[str, Any]) -> None:
        """An event, or the whole answer."""
        self.error = self.error or body.get("error") or (body if body.get("type") == "error" else None)
        self.leaked |= "_transfer_params" in json.dumps(body)
        if "choices" in body:
            self._take_choices(body)
        elif body.get("type") == "response.output_text.delta":
            self.parts.append(body["delta"])
        elif "response" in body or "output" in body:
            self._take_response(body.get("response", body), whole="output" in body)

    def _take_choices(self, body: dict[str, Any]) -> None:
        self.usage = body.get("usage") or self.usage
        self.prompt_ids += body.get("prompt_token_ids") or []
        for choice in body["choices"]:
            self.prompt_ids += choice.get("prompt_token_ids") or []
            self.token_ids += choice.get("token_ids") or []
            said = choice.get("message") or choice.get("delta") or choice
            self.parts.append(said.get("content") or said.get("text") or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _take_response(self, response: dict[str, Any], *, whole: bool) -> None:
        self.prompt_ids += response.get("prompt_token_ids") or []
        self.finish_reason = FINISH_REASONS.get(response["status"])
        if self.finish_reason is None:
            return
        self.token_ids += response["token_ids"]
        usage = response["usage"]
        self.usage = {name: usage[theirs] for name, theirs in USAGE.items()}
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        assert whole or text == self.text, f"the last event says {text!r}, those before it {self.text!r}"
        self.parts = [text]
        self.ended = True

    @property
    def explain(self) -> dict[str, str]:
        """What the router says of the turn: its `x-backhaul-…` headers."""
        prefix = "x-backhaul-"
        return {name.removeprefix(prefix): text for name, text in self.headers.items() if name.startswith(prefix)}


async def ask(
    front: Door,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    *,
    leave: float | None = None,
    pace: float = 0.0,
    reply: Reply | None = None,
) -> Reply:
    """Send it and read the answer; with `leave`, only so many of its events, or milliseconds long; with `pace`, that
    many seconds between two reads. A given `reply` has what came of the answer even when the rest fails."""
    streamed = bool(body.get("stream"))
    reply = reply or Reply(0, {})
    try:
        async with asyncio.timeout(None if leave is None or streamed else leave / 1000):
            async with front.client.post(front.url + path, json=body, headers=headers) as answer:
                reply.status = answer.status
                reply.headers = {name.lower(): value for name, value in answer.headers.items()}
                if answer.content_type == "text/event-stream":
                    await _read_events(answer, reply, leave if streamed else None, pace)
                else:
                    reply.take(json.loads(await answer.read()))
                    reply.ended = True
    except TimeoutError:
        if leave is None:
            raise
    return reply


async def _read_events(answer: aiohttp.ClientResponse, reply: Reply, leave: float | None, pace: float) -> None:
    parser = sse.SSEParser()
    async for chunk in answer.content.iter_any():
        for event in parser.feed(chunk):
            if event.data == sse.DONE:
                reply.ended = True
            elif event.data is not None:
                reply.take(json.loads(event.data))
            reply.num_events += 1
            if leave is not None and reply.num_events >= leave:
                answer.close()
                return
        if pace:
            await asyncio.sleep(pace)

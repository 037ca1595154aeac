"""An engine that obeys the wire contract without a model: records what it is asked, and plays scripted faults.

Its one answer is "Grüß dich 👋" in six pieces. The prompt has four tokens whatever it is, unless `tokenizes` is set:
then each message has one token per word, and an answer of its own the tokens it was sampled as.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy

from connectors.wire import sse
from connectors.wire.note import OUTPUT, TOKEN_NOTE

PIECES = ("Gr", "üß", " dich", " ", "👋", "")
OUTPUT_IDS = [11, 12, 13, 14, 15, 2]
PROMPT_IDS = [1, 7, 8, 9]
TEXT = "".join(PIECES)
BLOCK_SIZE = 2
START_OF_ANSWER = 3

Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    path: str
    headers: CIMultiDictProxy[str]
    body: dict[str, Any]


@dataclass
class StubEngine:
    role: str
    model: str = "m"
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)
    aborted: int = 0
    """Requests whose connection was closed on us."""
    scripts: deque[Script] = field(default_factory=deque)
    """Played once each, for the next requests, before the engine answers by itself again."""
    kv_layout: str | None = "layout-1"
    stream_params: bool = True
    owned_by: str = "backhaul"
    tokenizes: bool = False
    offers: bool = True
    """Whether a decode leg's answer offers its blocks."""
    offer_ttl: float | None = 480.0
    groups: int = 1
    """KV-cache groups of what it holds."""
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    keep_alive: bool = True
    """Whether a probe leaves a connection for the next request."""
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: it takes requests and answers none, the one for its models included."""
    leaving: bool = False
    """Told to stop: refuses what is new, as our engine does."""
    connections: set[Any] = field(default_factory=set)
    site: web.TCPSite | None = None

    @asynccontextmanager
    async def running(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[StubEngine]:
        self.awake.set()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/responses/{id}", self._stored)
        app.router.add_post("/kv/release", self._release)
        app.router.add_post("/tokenize", self._tokenize)
        app.add_routes(self.more_routes())
        app.router.add_post("/v1/{tail:.+}", self._serve)
        app.router.add_post("/inference/v1/{tail:.+}", self._serve)
        app.on_response_prepare.append(self._let_go)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self.site = web.TCPSite(runner, host, port)
        await self.site.start()
        self.url = f"http://{host}:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def more_routes(self) -> list[web.RouteDef]:
        """What an engine of another kind has besides."""
        return []

    async def stop_listening(self) -> None:
        assert self.site is not None
        await self.site.stop()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request.body for request in self.seen]

    async def _let_go(self, request: web.Request, response: web.StreamResponse) -> None:
        probed = request.method == "GET" or request.content_length == len("{}")
        if probed and not self.keep_alive:
            response.force_close()
            response.headers["Connection"] = "close"

    async def _models(self, _: web.Request) -> web.Response:
        await self.awake.wait()
        if self.leaving:
            return _leaving()
        card = {"id": self.model, "max_model_len": 4096, "owned_by": self.owned_by}
        return web.json_response({"object": "list", "data": [card]})

    async def _stored(self, request: web.Request) -> web.Response:
        return web.json_response({"id": request.match_info["id"], "on": self.role})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.tokenized.append(body)
        if not self.tokenizes:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        return web.json_response({"tokens": self.ids(body), "count": len(self.ids(body))})

    def ids(self, body: dict[str, Any]) -> list[int]:
        """Of the prompt: those the router sent along, else our own."""
        params = body.get("kv_transfer_params") or {}
        if params.get("prompt_token_ids"):
            return list(params["prompt_token_ids"])
        if "token_ids" in body:
            return list(body["token_ids"])
        if self.tokenizes and isinstance(prompt := body.get("prompt"), list):
            return list(prompt)
        if not self.tokenizes or "messages" not in body:
            return PROMPT_IDS
        ids: list[int] = []
        for message in body["messages"]:
            if message["role"] == "assistant":
                ids += [
                    START_OF_ANSWER,
                    *(OUTPUT_IDS if message["content"] == TEXT else map(word, message["content"].split())),
                ]
            else:
                ids += [1, *map(word, str(message["content"]).split())]
        return [*ids, START_OF_ANSWER]

    async def _release(self, request: web.Request) -> web.Response:
        self.released.append(await request.json())
        return web.json_response({"released": True})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body:  # a question whether there is such a route
            return web.json_response({"error": {"message": "a body is missing"}}, status=400)
        self.seen.append(Seen(request.path, request.headers, body))
        self.connections.add(request.transport)
        try:
            await self.awake.wait()
            if self.leaving:
                return _leaving()
            if self.scripts:
                return await self.scripts.popleft()(request, body)
            if body.get("stream"):
                return await self.play(request, self.events(body))
            return web.json_response(self.whole(body))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        except ConnectionResetError:
            self.aborted += 1
            return web.Response()  # to nobody; raised, it would be an error in the log of the test

    def params(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The transfer params of the answer: P's blocks for D, or D's blocks for the next turn."""
        asked = body.get("kv_transfer_params") or {}
        prefill = bool(asked.get("do_remote_decode"))
        wanted = asked.get("offer_blocks", asked.get("do_remote_prefill"))
        if not prefill and not (self.offers and wanted):
            return None
        num_tokens = len(self.ids(body)) + (0 if prefill else len(OUTPUT_IDS) - 1)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        ours = {"kv_layout": self.kv_layout, "remote_block_hashes": [f"{b:032x}" for b in range(num_blocks)]}
        if not prefill:
            if self.offer_ttl is not None:
                ours |= {"remote_blocks_ttl": min(self.offer_ttl, asked.get("remote_blocks_ttl", self.offer_ttl))}
        else:
            ours |= {
                "remote_prefill_cached_tokens": 1,
                "remote_prefill_pulled_tokens": asked.get("remote_num_tokens", 0),
            }
        return {
            "do_remote_prefill": prefill,
            "do_remote_decode": not prefill,
            "remote_block_ids": [list(range(3, 3 + num_blocks))] * self.groups,
            "remote_block_size": BLOCK_SIZE,
            "remote_engine_id": f"{self.role}-engine",
            "remote_request_id": f"{self.role}-{len(self.seen)}",
            "remote_host": "127.0.0.1",
            "remote_port": int(self.url.rsplit(":", 1)[1]),
            "remote_num_tokens": num_tokens,
            **(ours if self.kv_layout else {}),
        }

    def usage(self, body: dict[str, Any]) -> dict[str, int]:
        prompt, output = len(self.ids(body)), len(OUTPUT_IDS)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def note(self, body: dict[str, Any], *parts: str) -> dict[str, Any]:
        """The token note, if it was asked for."""
        known = {"prompt_token_ids": self.ids(body), "token_ids": OUTPUT_IDS}
        asked = body.get(TOKEN_NOTE)
        told = {part: known[part] for part in parts if asked != OUTPUT or part != "prompt_token_ids"}
        return {TOKEN_NOTE: told} if asked else {}

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        if "input" in body:
            return self.response(body) | self.note(body, "prompt_token_ids", "token_ids")
        chat, tokens = "messages" in body, "token_ids" in body
        ids = bool(body.get("return_token_ids"))
        choice: dict[str, Any] = {"finish_reason": "stop", "logprobs": None}
        if not tokens:
            choice |= {"message": {"role": "assistant", "content": TEXT}} if chat else {"text": TEXT}
        choice |= {"token_ids": OUTPUT_IDS if ids or tokens else None}
        if not chat and not tokens:
            choice["prompt_token_ids"] = self.ids(body) if ids else None
        n = (body.get("sampling_params") or body).get("n") or 1
        return {
            "id": "x-1",
            "object": "chat.completion" if chat else "text_completion",
            "model": self.model,
            "choices": [{"index": i, **choice} for i in range(n)],
            "usage": self.usage(body),
            "kv_transfer_params": self.params(body),
            "ec_transfer_params": None,
            **({"prompt_token_ids": self.ids(body) if ids else None} if chat or tokens else {}),
            **self.note(body, "prompt_token_ids", "token_ids"),
        }

    def events(self, body: dict[str, Any]) -> list[bytes]:
        if "input" in body:
            return self.response_events(body)
        chat, tokens = "messages" in body, "token_ids" in body
        ids = bool(body.get("return_token_ids"))
        base = {"id": "x-1", "object": "chat.completion.chunk" if chat else "text_completion", "model": self.model}
        events: list[dict[str, Any]] = []
        if chat:
            role = {**base, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            events.append(role | ({"prompt_token_ids": self.ids(body)} if ids else {}))
        for number, (piece, token) in enumerate(zip(PIECES, OUTPUT_IDS, strict=True)):
            last = number == len(PIECES) - 1
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None}
            if not tokens:
                choice |= {"delta": {"content": piece}} if chat else {"text": piece}
            if ids or tokens:
                choice["token_ids"] = [token]
                if not chat and not tokens and number == 0:
                    choice["prompt_token_ids"] = self.ids(body)
            params = {"kv_transfer_params": self.params(body) if last else None} if self.stream_params else {}
            told = {"prompt_token_ids": self.ids(body)} if tokens and ids and number == 0 else {}
            events.append({**base, "choices": [choice], **params, **told})
        events[0] |= self.note(body, "prompt_token_ids")
        events[-1] |= self.note(body, "token_ids")
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**base, "choices": [], "usage": self.usage(body)})
        return [*(sse.event(event) for event in events), sse.DONE_EVENT]

    def response(self, body: dict[str, Any]) -> dict[str, Any]:
        """An answer of the responses endpoint, without the note."""
        part = {"type": "output_text", "text": TEXT, "annotations": []}
        said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        usage = self.usage(body)
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        ids = {"prompt_token_ids": self.ids(body), "token_ids": OUTPUT_IDS} if body.get("return_token_ids") else {}
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": self.model,
            "status": "completed",
            "error": None,
            "output": [said],
            "usage": counts | {"total_tokens": usage["total_tokens"]},
            "kv_transfer_params": self.params(body),
            **ids,
        }

    def response_events(self, body: dict[str, Any]) -> list[bytes]:
        begun = {**self.response(body), "status": "in_progress", "output": [], "usage": None}
        for key in ("kv_transfer_params", "prompt_token_ids", "token_ids"):
            begun.pop(key, None)
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun} | self.note(body, "prompt_token_ids"),
            *({"type": "response.output_text.delta", "item_id": "msg_1", "delta": piece} for piece in PIECES),
            {"type": "response.completed", "response": self.response(body) | self.note(body, "token_ids")},
        ]
        return [
            f"event: {event['type']}\n".encode() + sse.event({**event, "sequence_number": number})
            for number, event in enumerate(events)
        ]

    async def play(
        self, request: web.Request, events: list[bytes], *, pause: float = 0.0, cut: bool = False
    ) -> web.StreamResponse:
        """Send events one by one. `cut` closes the connection after them, in the middle of the answer."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(pause)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response


def word(text: str) -> int:
    """The token of a word."""
    return 100 + sum(text.encode())


def _leaving() -> web.Response:
    error = {"message": "this engine is shutting down, send the request to another", "code": 503}
    return web.json_response({"error": error}, status=503, headers={"Retry-After": "5"})


def refuse(status: int, message: str = "no", *, headers: dict[str, str] | None = None) -> Script:
    async def script(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        error = {"message": message, "type": "TestError", "param": "p", "code": status}
        return web.json_response({"error": error}, status=status, headers=headers)

    return script


def hang_up(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()

"""A server whose engine follows a script, and whose transport writes down what it is asked to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import orjson
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from connectors.kv import KVConnector
from connectors.lease import Leases
from connectors.transport import Peer, Pull
from connectors.wire.seal import SealKeys
from connectors.wire.transfer import KVTransferParams
from engine.api.context import KVSide, Serving, Worker
from engine.app import make_app
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.formats.choose import choose_format
from engine.media.sight import Sight
from engine.messages import Inbox, Output, Shutdown, Stop, Submit
from engine.metrics import EngineMetrics
from engine.request import Request
from engine.tokenizer_files import tokenizer_from_folder
from tests.tiny import vocabulary

ENGINE_ID = "the-engine"
MAX_MODEL_LEN = 256
BLOCK_SIZE = 16
Script = Callable[[Request], Iterable[Output]]


def says(text: str, **end: Any) -> Script:
    """Answer with this text, a token per character, then `end` (finish_reason="length" by default)."""

    def script(request: Request) -> Iterable[Output]:
        tokens = list(byte_ids(text))
        for token in tokens[:-1]:
            yield Output(request.request_id, [token], num_cached_tokens=3)
        last = {"finish_reason": "length", "num_cached_tokens": 3} | end
        yield Output(request.request_id, tokens[-1:], **last)

    return script


def one_by_one(script: Script) -> Script:
    """The same, each output once the server has taken the last one, so that none are merged."""
    loop = asyncio.get_running_loop()

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def slow(request: Request) -> Iterable[Output]:
        for output in script(request):
            yield output
            if not output.finished:  # after the last one, the test may have ended
                asyncio.run_coroutine_threadsafe(turns(), loop).result(5)

    return slow


def byte_ids(text: str) -> list[int]:
    """One token per character of an ASCII text."""
    return [_TOKENS.index("Ġ" if character == " " else character) for character in text]


_TOKENS = vocabulary()[0]


class RecordingTransport:
    def __init__(self) -> None:
        self.failed = False
        self.released: list[tuple[Peer, str]] = []

    def pull(self, pull: Pull) -> None:
        raise AssertionError("the server never pulls")

    def release(self, peer: Peer, remote_request_id: str) -> None:
        self.released.append((peer, remote_request_id))

    def renew(self, peer: Peer, remote_request_ids: Sequence[str]) -> None:
        raise AssertionError("the server never renews")

    def agent_info(self) -> dict[str, Any]:
        return {"version": 1, "engine_id": ENGINE_ID}

    def close(self) -> None:
        pass


class Stage:
    """The server under test and everything behind it."""

    def __init__(
        self,
        model: Path,
        *,
        role: Literal["prefill", "decode", "both"] = "both",
        kv: bool = False,
        capacity: int = 8,
        max_body_bytes: int = 100_000,
        max_model_len: int = MAX_MODEL_LEN,
        seals: SealKeys | None = None,
        enable_scale_out: bool = True,
        chat_template: Path | None = None,
        sight: Sight | None = None,
    ) -> None:
        self.script: Script = says("hello")
        self.on_stop: Callable[[Request, int], Output] = lambda request, _: Output(request.request_id, [], "stop")
        """The last output of a request that a stop string ended after so many tokens."""
        self.submitted: list[Request] = []
        self.stops: list[Stop] = []
        self.other: list[Inbox] = []
        self.inbox: SimpleQueue[Inbox] = SimpleQueue()
        self.transport = RecordingTransport()
        self.leases = Leases(claim_seconds=10)
        connector = KVConnector(
            transport=self.transport,
            leases=self.leases,
            role=role,
            engine_id=ENGINE_ID,
            host="127.0.0.1",
            port=1,
            block_size=BLOCK_SIZE,
            kv_layout="layout",
            lease_seconds=30,
            load_failure_policy="recompute",
        )
        self.metrics = EngineMetrics("tiny")
        self.tokenizer = tokenizer_from_folder(model)
        if chat_template is not None:
            self.tokenizer.use_chat_template(chat_template)
        self.client = EngineClient(self.inbox, asyncio.get_running_loop(), capacity=capacity, observer=self.metrics)
        self.serving = Serving(
            model_name="tiny",
            tokenizer=self.tokenizer,
            chat=choose_format(self.tokenizer, max_model_len=max_model_len),
            client=self.client,
            metrics=self.metrics,
            inbox=self.inbox,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            model_fingerprint=bytes(16),
            kv=KVSide(ENGINE_ID, connector) if kv else None,
            seals=seals,
            sight=sight,
        )
        config = EngineConfig(model="tiny", role=role, max_body_bytes=max_body_bytes, enable_scale_out=enable_scale_out)
        self.worker = Worker(config, serving=self.serving)
        self._server = TestServer(make_app(self.worker))
        self._thread = threading.Thread(target=self._engine, daemon=True)

    async def __aenter__(self) -> Stage:
        await self._server.start_server()
        self.url = str(self._server.make_url("")).rstrip("/")
        self.session = ClientSession(self.url)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self._server.close()
        self.inbox.put(Shutdown())
        self._thread.join(5)

    def _engine(self) -> None:
        while True:
            message = self.inbox.get()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Submit):
                self.submitted.append(message.request)
                for output in self.script(message.request):
                    self.client.emit([output])
            elif isinstance(message, Stop):
                self.stops.append(message)
                if message.aborted:
                    self.client.emit([Output(message.request_id, [], "abort")])
                else:
                    (request,) = [r for r in self.submitted if r.request_id == message.request_id]
                    self.client.emit([self.on_stop(request, message.num_output_tokens or 0)])
            else:
                self.other.append(message)

    async def post(self, path: str, body: object = None, **options: Any) -> tuple[int, Any]:
        if body is not None:
            options["json"] = body
        async with self.session.post(path, **options) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | fields)

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer; the last must be [DONE]."""
        async with self.session.post(path, json={"stream": True} | body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        events = text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        assert events.pop() == "data: [DONE]"
        return [orjson.loads(event.removeprefix("data: ")) for event in events]


def params_for_decode(**changes: Any) -> dict[str, Any]:
    """What a prefill engine answered about a prompt of 20 tokens."""
    params = KVTransferParams(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_block_ids=[[4, 5]],
        remote_engine_id="the-prefill-engine",
        remote_request_id="chatcmpl-p",
        remote_host="10.0.0.1",
        remote_port=8100,
        remote_num_tokens=20,
        remote_prefill_cached_tokens=16,
        kv_layout="layout",
    )
    return params.to_json() | changes


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (conditions change on other threads)
            await asyncio.sleep(0.005)

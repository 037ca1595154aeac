"""A stub engine that plays vLLM 0.32: it tells its version and its cache, has no release call, and its prefill engine
tells the decode engine of blocks that it was given and has read or does not need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.stub_engine import BLOCK_SIZE, StubEngine

RELEASE_PROMPT = [0]


@dataclass
class VLLMStub(StubEngine):
    owned_by: str = "vllm"
    kv_layout: str | None = None
    tokenizes: bool = True
    version: str = "0.32.0"
    num_blocks: int = 1000
    pulls: int = 1
    """How often it has pulled, by its metrics: by that a prefill engine is known to do so."""
    decode: VLLMStub | None = None
    """Of a prefill engine: whose blocks it is given."""
    held: dict[str, int] = field(default_factory=dict)
    """Of a decode engine: the blocks it holds for a next turn, by request."""

    def more_routes(self) -> list[web.RouteDef]:
        return [web.get("/version", self._version), web.get("/metrics", self._metrics)]

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, _: web.Request) -> web.Response:
        cache = f'block_size="{BLOCK_SIZE}",cache_dtype="auto",engine="0",num_gpu_blocks="{self.num_blocks}"'
        pulled = f'vllm:nixl_bytes_transferred_count{{engine="0"}} {self.pulls}.0\n'
        return web.Response(text=f"vllm:cache_config_info{{{cache}}} 1.0\n{pulled if self.pulls else ''}")

    async def _release(self, request: web.Request) -> web.Response:
        self.released.append(await request.json())
        return web.json_response({"detail": "Not Found"}, status=404)

    def params(self, body: dict[str, Any]) -> dict[str, Any] | None:
        params = super().params(body)
        if params is None:
            return None
        del params["remote_block_size"]
        asked = body["kv_transfer_params"]
        if params["do_remote_decode"]:
            self.held[params["remote_request_id"]] = len(params["remote_block_ids"][0])
        elif self.decode is not None and asked.get("remote_block_ids"):
            self.decode.held.pop(asked["remote_request_id"], None)
        return params

    @property
    def release_requests(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if body.get("prompt") == RELEASE_PROMPT]

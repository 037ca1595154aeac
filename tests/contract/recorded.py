"""Engines that play what real vLLM engines have said: tests/fixtures/vllm-0.32."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.stub_engine import Script, StubEngine

FOLDER = Path(__file__).parents[1] / "fixtures/vllm-0.32"
MODEL = "smollm2"
BLOCK_SIZE = 32


def recorded(name: str) -> dict[str, Any]:
    """`request`: method, path, body; `response`: status, content_type, and body (JSON) or lines (text)."""
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def body_said(name: str) -> dict[str, Any]:
    return dict(recorded(name)["response"]["body"])


def events_said(name: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, without the `[DONE]`."""
    data = [line.removeprefix("data: ") for line in recorded(name)["response"]["lines"] if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def replay(name: str) -> Script:
    said = recorded(name)["response"]

    async def script(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        text = json.dumps(said["body"]) if "body" in said else "\n".join(said["lines"])
        return web.Response(text=text, status=said["status"], content_type=said["content_type"])

    return script


@dataclass
class RecordedEngine(StubEngine):
    model: str = MODEL
    prompt_ids: list[int] = field(default_factory=list)
    """What it tokenizes any prompt to."""

    def plays(self, *names: str) -> None:
        self.scripts.extend(map(replay, names))

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(body_said("models"))

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.tokenized.append(await request.json())
        told = {"tokens": self.prompt_ids, "count": len(self.prompt_ids)}
        return web.json_response({**body_said("tokenize"), **told})

    async def _release(self, _: web.Request) -> web.Response:
        said = recorded("error_no_release")["response"]
        return web.json_response(said["body"], status=said["status"])

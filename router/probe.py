"""Find out what an engine can do by asking it: once when it is discovered, and again when it may have changed.

A handful of small questions, one after the other on one connection, each with its limits of time and size. Nothing is
computed for any of them: a route is asked in a way that it refuses. No answer, or nonsense, leaves a fact unknown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar

import orjson

from router.capabilities import OURS, Capabilities, Kind
from router.client import Client
from router.client_protocol import ClientError

MAX_VERSION_BYTES: Final = 4 << 10
MAX_REFUSAL_BYTES: Final = 64 << 10
MAX_METRICS_BYTES: Final = 4 << 20
MAX_AGENT_BYTES: Final = 1 << 20
MAX_WORD: Final = 128
MAX_COUNT: Final = 1 << 31

GENERATE: Final = "/inference/v1/generate"
JSON: Final = {"Content-Type": "application/json"}

_CACHE_CONFIG: Final = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w{1,64})="([^"\\\n]{0,256})"')
_PULLED: Final = re.compile(rb"^vllm:nixl_bytes_transferred_count(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)

T = TypeVar("T")


def kind_of(cards: Mapping[str, Mapping[str, Any]]) -> Kind | None:
    """Whose engine lists such models."""
    owners = {card.get("owned_by") if isinstance(card.get("owned_by"), str) else None for card in cards.values()}
    if owners == {"backhaul"}:
        return "backhaul"
    return "vllm" if owners == {"vllm"} else None


class Probe:
    """The questions to one engine."""

    def __init__(self, client: Client, url: str, headers: Mapping[str, str], seconds: float) -> None:
        self._client = client
        self._url = url
        self._headers = headers
        self._seconds = seconds
        self._due = 0.0
        self.is_complete = True
        """Whether every question was answered, well or not; a busy engine may be asked again."""

    async def run(self, kind: Kind | None, *, only_prefills: bool) -> Capabilities:
        """What it answers, within `seconds`. Raises nothing."""
        ours = kind == OURS
        self._due = asyncio.get_running_loop().time() + self._seconds
        version = await self._limited(self._version())
        cache = (None if ours else await self._limited(self._metrics())) or {}
        agent = (await self._limited(self._agent()) if ours else None) or {}
        tokenize = await self._limited(self._has_route("/tokenize"))
        release = await self._limited(self._has_route("/kv/release"))
        scale_out = await self._limited(self._serves_generate())
        has_pulled = only_prefills and _has_pulled(cache.pop(_PULLS, None))
        return Capabilities(
            kind=kind,
            version=version,
            engine_id=_word(agent.get("engine_id")),
            block_size=_count(cache.get("block_size")),
            num_blocks=_count(agent.get("num_blocks") if ours else cache.get("num_gpu_blocks")),
            cache_dtype=_word(cache.get("cache_dtype")),
            kv_layout=_word(agent.get("kv_layout")),
            bidirectional=True if has_pulled else None,  # blocks of a decode engine: of what else
            tokenize=tokenize,
            scale_out=scale_out,
            release=release,
        )

    async def _limited(self, question: Awaitable[T | None]) -> T | None:
        """Its answer, in at most half of the time for all."""
        try:
            async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + self._seconds / 2, self._due)):
                return await question
        except (ClientError, TimeoutError):
            self.is_complete = False
        except ValueError:  # of what was to be JSON
            pass
        return None

    async def _version(self) -> str | None:
        answer = await self._get_json("/version", MAX_VERSION_BYTES)
        return _word(answer.get("version"))

    async def _agent(self) -> dict[str, Any]:
        """Of our engines: who it is, and the layout of its KV."""
        return await self._get_json("/kv/agent", MAX_AGENT_BYTES)

    async def _metrics(self) -> dict[str, Any]:
        """Of vLLM: the labels that tell its cache's configuration, and how often it has pulled."""
        with await self._client.request("GET", f"{self._url}/metrics", self._headers) as answer:
            if answer.status != 200:
                return {}
            text = bytearray()
            while len(text) < MAX_METRICS_BYTES and (part := await answer.readany()):
                text += part
        told: dict[str, Any] = {}
        if found := _CACHE_CONFIG.search(text):
            told = {label[1].decode(): label[2].decode("utf-8", "replace") for label in _LABEL.finditer(found[1])}
        if found := _PULLED.search(text):
            told[_PULLS] = found[1].decode()
        return told

    async def _has_route(self, path: str) -> bool | None:
        """Whether there is something to POST to. A GET of it is refused in one way or the other."""
        with await self._client.request("GET", self._url + path, self._headers) as answer:
            await answer.read(MAX_REFUSAL_BYTES)
            return {405: True, 404: False}.get(answer.status)

    async def _serves_generate(self) -> bool | None:
        """Where it is switched off, the route is there all the same: it says so with 403."""
        if not await self._has_route(GENERATE):
            return False
        headers = {**self._headers, **JSON}
        with await self._client.request("POST", self._url + GENERATE, headers, b"{}") as answer:
            await answer.read(MAX_REFUSAL_BYTES)
            return {400: True, 422: True, 403: False, 404: False, 501: False}.get(answer.status)

    async def _get_json(self, path: str, limit: int) -> dict[str, Any]:
        with await self._client.request("GET", self._url + path, self._headers) as answer:
            body = orjson.loads(await answer.read(limit)) if answer.status == 200 else None
        return body if isinstance(body, dict) else {}


_PULLS: Final = "nixl_pulls"


def _word(value: object) -> str | None:
    """A short word of an engine, which goes into logs, and onto terminals."""
    good = isinstance(value, str) and 0 < len(value) <= MAX_WORD and value.isprintable() and value != "None"
    return str(value) if good else None


def _count(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_COUNT else None


def _has_pulled(count: object) -> bool:
    try:
        return float(str(count)) > 0
    except ValueError:
        return False

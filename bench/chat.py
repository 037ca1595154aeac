"""What the chat benchmarks share: messages of a known length, a streamed answer with its timing, engine counters."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from connectors.wire import sse

Message = dict[str, str]

ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=300)
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
COMMON_LABELS = ("model_name", "engine")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")

WORDS = (
    *("train", "copper", "timber", "letter", "ship", "lamp", "captain", "book", "price", "river", "winter", "summer"),
    *("apple", "garden", "market", "stone", "window", "bridge", "silver", "music", "paper", "doctor", "road", "salt"),
)
"""One token each, with the space before it, for the small default model."""


def user_message(chooser: random.Random, words: int) -> Message:
    return {"role": "user", "content": "Write a story about: " + " ".join(chooser.choice(WORDS) for _ in range(words))}


@dataclass(frozen=True, slots=True)
class Reply:
    ttft: float
    """Seconds from sending the request to the first piece of text."""
    text: str
    prompt_tokens: int
    output_tokens: int
    plan: str
    """How the router says it went about it, and why; empty if someone else answered."""


async def stream_chat(session: aiohttp.ClientSession, base_url: str, body: Mapping[str, Any]) -> Reply:
    """Send one chat request and read its answer to the end. Raises RuntimeError if the answer is an error."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text, parser = "", sse.SSEParser()
    usage: dict[str, Any] = {}
    first: float | None = None
    started = time.perf_counter()
    async with session.post(
        f"{base_url}/chat/completions",
        data=orjson.dumps(asked),
        headers={"Content-Type": "application/json", "X-Backhaul-Explain": "1"},
        timeout=ANSWER_TIMEOUT,
    ) as response:
        if response.status != 200:
            raise RuntimeError(f"{base_url} answered {response.status}: {(await response.text())[:500]}")
        plan = response.headers.get("X-Backhaul-Plan", "")
        async for piece in response.content.iter_any():
            for event in parser.feed(piece):
                if event.data in (None, sse.DONE):
                    continue
                chunk = orjson.loads(event.data or b"")
                if "error" in chunk:
                    raise RuntimeError(f"{base_url} broke off: {chunk['error']}")
                for choice in chunk.get("choices") or ():
                    if content := choice["delta"].get("content"):
                        first = first or time.perf_counter()
                        text += content
                usage = chunk.get("usage") or usage
    ended = time.perf_counter()
    return Reply((first or ended) - started, text, usage["prompt_tokens"], usage["completion_tokens"], plan)


async def scrape(session: aiohttp.ClientSession, engine_url: str) -> Counter[str]:
    """An engine's metrics: `name`, samples of one name added up, and `name:value` for a label that tells them apart."""
    async with session.get(f"{engine_url}/metrics") as response:
        response.raise_for_status()
        text = await response.text()
    values: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value  # type: ignore[assignment]
            for label, value in sample.labels.items():
                if label not in COMMON_LABELS:
                    values[f"{sample.name}:{value}"] += sample.value  # type: ignore[assignment]
    return values


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

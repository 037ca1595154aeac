"""Ten-turn chats: between them, the engines compute what is new in a turn, and a block each besides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines import Engine, engine_command, engines
from tests.property.talker import HALF_CHARACTERS
from tests.router_harness import Front, router_over
from tests.tiny import IM_END, vocabulary
from tests.valkey import valkey

TURNS = 10
BLOCK = 16
ANSWER = 80
"""Tokens; more than the 64 from which on a prefill engine pulls rather than computes."""
QUESTION = "a turn of the chat, with letters of which a few are new: {}"
SILENT = {str(token): -100 for token in (IM_END, *(vocabulary()[0].index(chr(byte)) for byte in HALF_CHARACTERS))}
"""Half characters cannot be sent back as they were said, and answers are to have their full length."""


@pytest.fixture(scope="module")
def four(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    command = engine_command(talker, "--served-model-name", "tiny", "--dtype", "float32")
    roles = ("prefill", "prefill", "decode", "decode")
    with engines(tmp_path_factory.mktemp("four"), *([*command, "--role", role] for role in roles)) as started:
        yield started


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("store")) as server:
        yield server.url


def computed(fleet: list[Engine]) -> float:
    return sum(
        value
        for engine in fleet
        for name, value in engine.metrics().items()
        if name.startswith("vllm:prompt_tokens_by_source_total{") and 'source="local_compute"' in name
    )


async def talk(front: Front, name: str) -> tuple[int, list[dict[str, Any]]]:
    """How many prompt tokens were new in all turns, and what the router said of each."""
    messages: list[dict[str, str]] = []
    num_new, num_known, told = 0, 0, []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": QUESTION.format(f"{name} {turn}")})
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": ANSWER, "logit_bias": SILENT}
        answer = await front.post(body, headers={"X-Backhaul-Explain": "1"})
        assert answer.status == 200, answer.raw
        usage = answer.json["usage"]
        num_new += usage["prompt_tokens"] - num_known
        num_known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        told.append(answer.explain)
        messages.append({"role": "assistant", "content": answer.text_of_whole})
    return num_new, told


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("decode_only", [0, 200])
async def test_no_token_is_computed_twice(four: list[Engine], store: str, size: int, decode_only: int) -> None:
    prefill, decode = four[:size], four[2 : 2 + size]
    before = computed(four)
    async with router_over(
        [engine.url for engine in prefill],
        [engine.url for engine in decode],
        store,
        decode_only_tokens=decode_only,
        probe_timeout=20.0,
    ) as front:
        chats = await asyncio.gather(*(talk(front, f"{size} {decode_only} {chat}") for chat in range(3)))
    num_new = sum(new for new, _ in chats)
    turns = [told for _, all_told in chats for told in all_told]
    num_computed = computed(four) - before
    assert num_new / 2 < num_computed <= num_new + 2 * BLOCK * len(turns)
    later = [told for told in turns if told["turn"] > 1]
    assert len(later) == 3 * (TURNS - 1)
    if decode_only:
        assert all(told["reason"] == "short_suffix" for told in later)
    else:
        assert all(told["kv"] == "offered" for told in later)
        assert sum(told["tokens_pulled"] for told in later) >= (ANSWER - BLOCK) * len(later)

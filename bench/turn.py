"""Time to first token of a growing chat, turn by turn, and which engine computed which prompt tokens.

    python -m bench.turn [--prefill 1] [--decode 1] [--turns 10] [--history 2000] [--answer 80] [--repeat 1]

Three ways of serving the same chat on the same engines, taking turns within one run, so that their ratios mean
something on a noisy machine:

    ours        the router of `backhaul up`
    reference   a proxy as public ones are today: keyed by conversation id, round robin (`bench/reference.py`)
    recompute   the router again, each turn as a conversation nobody has seen, under a new `cache_salt`

In the middle one of the turns after the first, `--history` tokens have gone before, so that the median over those turns
is the time at that length. `recompute` asks for one token of the answer of `ours`' chat; the others answer in full.

New tokens of a turn are those of its prompt no engine had KV for: its length less the last turn's prompt and answer,
whose last token has no KV either. Engines together should compute them and at most one block each besides. Three of the
longest prompts must fit into an engine's KV cache, or evictions are measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import psutil
from pydantic import SecretStr

from bench import doors
from bench.chat import BY_SOURCE, SOURCES, Message, Reply, scrape, stream_chat, user_message
from bench.reference import running_reference
from bench.stack import running_stack
from bench.turn_report import Sample, print_report, to_json
from connectors.wire.seal import SealKeys

TEMPLATE_TOKENS = 14
"""About what a user message has besides its words, and an answer's turn besides the answer."""
LEAST_TOKENS = 8
CALIBRATION_WORDS = (8, 40)
READ_BUFFER = 8 << 20
"""Bytes; an event with the params of a long conversation is one line."""

ArmName = Literal["ours", "reference", "recompute"]
ARMS: tuple[ArmName, ...] = ("ours", "reference", "recompute")


@dataclass
class Chat:
    """One arm's side of a conversation."""

    messages: list[Message]
    known: int = 0
    """Tokens whose KV the last turn left behind: its prompt and answer, without the last token."""

    def replied(self, reply: Reply) -> None:
        self.messages.append({"role": "assistant", "content": reply.text})
        self.known = reply.prompt_tokens + reply.output_tokens - 1


@dataclass
class Bench:
    session: aiohttp.ClientSession
    model: str
    engines: Sequence[Mapping[str, Any]]
    """`url` and `role` of each."""
    urls: Mapping[ArmName, str]
    answer: int
    """Tokens of every answer."""
    samples: list[Sample] = field(default_factory=list)

    async def warm_up(self, rounds: int) -> None:
        """Connections, handshakes, the first touch of everything; once for every engine of the larger pool."""
        for number in range(rounds):
            for arm in ARMS:
                hello = [{"role": "user", "content": f"Hello from {arm}, number {number}."}]
                await stream_chat(self.session, self.urls[arm], self._body(hello, 4, f"warm-{arm}-{number}"))

    async def tokens_per_word(self) -> float:
        counts = []
        for words in CALIBRATION_WORDS:
            body = self._body([user_message(random.Random(0), words)], 1, f"words-{words}")
            counts.append((await stream_chat(self.session, self.urls["ours"], body)).prompt_tokens)
        return (counts[1] - counts[0]) / (CALIBRATION_WORDS[1] - CALIBRATION_WORDS[0])

    async def chat(self, number: int, turns: int, words: int) -> None:
        """One conversation, served in every way. The order changes from turn to turn."""
        chooser = random.Random(number)
        start = {"role": "system", "content": f"You are a story teller. This is session {number}."}
        ours, reference = Chat([start]), Chat([start])
        for turn in range(1, turns + 1):
            message = user_message(chooser, words)
            for chat in (ours, reference):
                chat.messages.append(message)
            asked, known = list(ours.messages), ours.known
            first = (turn + number) % len(ARMS)
            for arm in (*ARMS[first:], *ARMS[:first]):
                if arm == "recompute":
                    await self._measure(arm, turn, known, self._body(asked, 1, f"recompute-{number}-{turn}"))
                    continue
                chat = ours if arm == "ours" else reference
                body = self._body(chat.messages, self.answer, f"{arm}-{number}")
                chat.replied(await self._measure(arm, turn, chat.known, body))
            print(f"chat {number + 1}: {turn} of {turns} turns", file=sys.stderr, flush=True)

    async def _measure(self, arm: ArmName, turn: int, known: int, body: Mapping[str, Any]) -> Reply:
        before = await self._counters()
        reply = await stream_chat(self.session, self.urls[arm], body)
        after = await self._counters()
        spent: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        num_computing = 0
        for engine, old, new in zip(self.engines, before, after, strict=True):
            moved = Counter({source: int((new - old)[f"{BY_SOURCE}:{source}"]) for source in SOURCES})
            spent[engine["role"]] += moved
            num_computing += moved["local_compute"] > 0
        prefill, decode = spent["prefill"], spent["decode"]
        sample = Sample(
            arm=arm,
            turn=turn,
            prompt_tokens=reply.prompt_tokens,
            known_tokens=known,
            ttft=reply.ttft,
            plan=reply.plan,
            computed_prefill=prefill["local_compute"],
            computed_decode=decode["local_compute"],
            num_computing=num_computing,
            pulled_back=prefill["external_kv_transfer"],
            handed_over=decode["external_kv_transfer"],
            hits_prefill=prefill["local_cache_hit"],
            hits_decode=decode["local_cache_hit"],
        )
        self.samples.append(sample)
        return reply

    async def _counters(self) -> list[Counter[str]]:
        return [await scrape(self.session, engine["url"]) for engine in self.engines]

    def _body(self, messages: list[Message], answer: int, conversation: str) -> dict[str, Any]:
        """`conversation` is the salt too: what one arm computed is of no use to another, though the texts are equal."""
        return {
            "model": self.model,
            "messages": messages,
            "conversation_id": conversation,
            "cache_salt": conversation,
            "max_tokens": answer,
            "min_tokens": answer,
            "temperature": 0,
        }


def message_tokens(turns: int, history: int, answer: int) -> int:
    """How long messages must be for `history` tokens to have gone before the middle one of turns 2, 3, …"""
    middle = (2 + turns) // 2
    tokens = -(-history // (middle - 1)) - answer - TEMPLATE_TOKENS
    if tokens < LEAST_TOKENS:
        raise SystemExit(f"{turns} turns with answers of {answer} tokens exceed --history {history}; give a larger one")
    return tokens


async def run(args: argparse.Namespace, facts: Mapping[str, Any]) -> list[Sample]:
    engines = facts["engines"]
    prefill, decode = ([e["url"] for e in engines if e["role"] == role] for role in ("prefill", "decode"))
    async with (
        aiohttp.ClientSession(read_bufsize=READ_BUFFER) as session,
        running_reference(session, prefill, decode, seal_keys(engines[0]["pid"])) as reference,
    ):
        urls: dict[ArmName, str] = {
            "ours": facts["base_url"],
            "reference": reference,
            "recompute": facts["base_url"],
        }
        bench = Bench(session, facts["model"], engines, urls, args.answer)
        await bench.warm_up(max(args.prefill, args.decode))
        tokens = message_tokens(args.turns, args.history, args.answer)
        words = round(tokens / await bench.tokens_per_word())
        for number in range(args.repeat):
            await bench.chat(number, args.turns, words)
    return bench.samples


def seal_keys(pid: int) -> SealKeys:
    """The key of an engine that `backhaul up` has started: only the environment of that process has it."""
    keys = SealKeys.from_settings(SecretStr(psutil.Process(pid).environ()["BACKHAUL_ENGINE_SEAL_KEY"]), None)
    assert keys is not None
    return keys


def stack_flags(args: argparse.Namespace) -> Iterator[str]:
    for name in ("model", "prefill", "decode", "threads"):
        if (value := getattr(args, name)) is not None:
            yield from (f"--{name}", str(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="GGUF file or HF folder; default: the small model")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, help="decode engines")
    parser.add_argument("--threads", type=int, help="compute threads per engine; default: the cores, shared out")
    parser.add_argument("--turns", type=int, default=10, help="at least 2")
    parser.add_argument("--history", type=int, default=2000, help="tokens that went before the middle turn")
    parser.add_argument("--answer", type=int, default=80, help="tokens; more than kv_recompute_threshold")
    parser.add_argument("--repeat", type=int, default=1, help="chats")
    parser.add_argument("--doors", type=int, metavar="PROMPTS", help="compare the endpoints instead: see bench.doors")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    args = parser.parse_args()
    if args.turns < 2:
        parser.error("--turns must be at least 2")
    if args.doors:
        with running_stack(*stack_flags(args)) as facts:
            asyncio.run(doors.run(facts, args.doors))
        return
    message_tokens(args.turns, args.history, args.answer)
    with running_stack(*stack_flags(args)) as facts:
        samples = asyncio.run(run(args, facts))
    settings = {**vars(args), "model": facts["model"]}
    del settings["json"]
    print_report(samples, settings)
    if args.json:
        args.json.write_text(json.dumps(to_json(samples, settings), indent=1) + "\n")


if __name__ == "__main__":
    main()

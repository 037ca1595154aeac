"""Routers in front of the same vLLM engines, compared: `python -m bench.vllm NAME=URL NAME=URL --truth URL`

Every target (a router, a proxy, an engine) has the same kinds of conversation, the targets in turn, with words of its
own so that nobody profits from what an engine has cached for another.

*Time to first token*: conversations of five turns that only add, streamed, one at a time. Medians by turn, and those of
the ratios to the first target in the same conversation. *Wrong answers*: conversations with every kind of edited
history (`bench/histories.py`), streamed and in one piece; wrong is what differs from the greedy answer of an engine
without any cache, at --truth (`--no-enable-prefix-caching`, no KV connector).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from bench.chat import Message, stream_chat, user_message
from bench.histories import SCRIPTS, Say
from bench.stack import provenance

TURNS = 5
ROWS = [f"{script} {how}" for script in SCRIPTS for how in ("stream", "whole")]


async def ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], *, stream: bool) -> str:
    if stream:
        return (await stream_chat(session, f"{url}/v1", body)).text
    async with session.post(
        f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=300)
    ) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}: {(await answer.text())[:300]}")
        return str((await answer.json())["choices"][0]["message"]["content"])


async def first_tokens(
    session: aiohttp.ClientSession, targets: Mapping[str, str], options: argparse.Namespace
) -> Mapping[str, list[list[float]]]:
    """Seconds to the first token, by target and turn."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in range(TURNS)] for name in targets}
    for number in range(options.conversations):
        histories: dict[str, list[Message]] = {name: [] for name in targets}
        for turn in range(TURNS):
            # Who comes first in one conversation comes last in the next.
            for name, url in list(targets.items())[:: 1 if number % 2 else -1]:
                chooser = random.Random(f"{name} {number} {turn} {options.seed}")
                history = histories[name]
                history.append(user_message(chooser, options.new if turn else options.history))
                body = {**plain_body(options, history), "conversation_id": f"speed-{options.seed}-{number}-{name}"}
                reply = await stream_chat(session, f"{url}/v1", body)
                history.append({"role": "assistant", "content": reply.text})
                seconds[name][turn].append(reply.ttft)
                print(f"{number + 1}.{turn + 1} {name}: {reply.ttft:.3f} s", file=sys.stderr, flush=True)
    return seconds


async def wrong_answers(
    session: aiohttp.ClientSession, targets: Mapping[str, str], options: argparse.Namespace
) -> Mapping[str, Counter[str]]:
    """By target: `SCRIPT STREAMED` and `all`, `wrong` or `failed`."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for number, stream, (name, url) in itertools.product(range(options.rounds), (True, False), targets.items()):

        async def play(
            script: str, number: int = number, stream: bool = stream, name: str = name, url: str = url
        ) -> None:
            where = f"{script} {'stream' if stream else 'whole'}"
            conversation = f"{where} {number} {options.seed} {name}"
            say = compared(session, url, options, counts[name], where, conversation, stream=stream)
            await SCRIPTS[script](say, random.Random(conversation))

        await asyncio.gather(*map(play, SCRIPTS))
        print(f"{name}: {_cell(counts[name], ROWS)}", file=sys.stderr)
    return counts


def compared(
    session: aiohttp.ClientSession,
    url: str,
    options: argparse.Namespace,
    count: Counter[str],
    where: str,
    conversation: str,
    *,
    stream: bool,
) -> Say:
    async def say(messages: list[Message]) -> str:
        body = plain_body(options, messages)
        right = await ask(session, options.truth, body, stream=False)
        count[f"{where} all"] += 1
        try:
            text = await ask(session, url, {**body, "conversation_id": conversation}, stream=stream)
        except (RuntimeError, aiohttp.ClientError, KeyError) as error:
            count[f"{where} failed"] += 1
            print(f"{url}: {where}: {error}", file=sys.stderr)
            return right
        count[f"{where} wrong"] += text != right
        return text

    return say


def plain_body(options: argparse.Namespace, messages: Sequence[Message]) -> dict[str, Any]:
    return {"model": options.model, "messages": list(messages), "max_tokens": options.answer, "temperature": 0}


def print_first_tokens(seconds: Mapping[str, list[list[float]]]) -> None:
    first = next(iter(seconds))
    heads = [*(f"{name}, s" for name in seconds), *(f"{name} / {first}" for name in seconds)]
    print(f"\n| turn | {' | '.join(heads)} |")
    print("| ---: " * (1 + 2 * len(seconds)) + "|")
    for turn in range(TURNS):
        medians = [statistics.median(turns[turn]) for turns in seconds.values()]
        ratios = [
            statistics.median(mine / theirs for mine, theirs in zip(turns[turn], seconds[first][turn], strict=True))
            for turns in seconds.values()
        ]
        cells = [f"{median:.3f}" for median in medians] + [f"{ratio:.2f}" for ratio in ratios]
        print(f"| {turn + 1} | {' | '.join(cells)} |")


def print_wrong_answers(counts: Mapping[str, Counter[str]]) -> None:
    print(f"\n| history | {' | '.join(counts)} |\n| --- {'| ---: ' * len(counts)}|")
    for row in ROWS:
        print(f"| {row} | {' | '.join(_cell(count, [row]) for count in counts.values())} |")
    print(f"| all | {' | '.join(_cell(count, ROWS) for count in counts.values())} |")


def _cell(count: Counter[str], rows: Sequence[str]) -> str:
    asked, wrong, failed = (sum(count[f"{row} {what}"] for row in rows) for what in ("all", "wrong", "failed"))
    return f"{wrong} wrong of {asked}" + (f", {failed} failed" if failed else "")


async def run(options: argparse.Namespace) -> None:
    targets = dict(target.split("=", 1) for target in options.targets)
    print(provenance())
    async with aiohttp.ClientSession() as session:
        if options.conversations:
            print_first_tokens(await first_tokens(session, targets, options))
        if options.truth and options.rounds:
            print_wrong_answers(await wrong_answers(session, targets, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="NAME=URL", help="without /v1")
    parser.add_argument("--truth", metavar="URL", help="an engine without any cache; without it nothing is compared")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--conversations", type=int, default=10, help="for the times, of each target")
    parser.add_argument("--rounds", type=int, default=1, help="of every kind of history")
    parser.add_argument("--history", type=int, default=400, help="words of the first message")
    parser.add_argument("--new", type=int, default=60, help="words of each later one")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument("--seed", default="1")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

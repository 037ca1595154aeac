"""What KV kept for chats that never come back costs the others: a small decode pool, with and without its leases.

    python -m bench.hostages [--conversations 200] [--blocks 64] [--concurrency 6] [--repeat 2] [--model PATH]

Two stacks with one prefill and one decode engine each, whose decode engine has `--blocks` blocks. One offers every
finished chat to a next turn that never comes; soon all its blocks are under leases. The other keeps nothing. Both get
the same short chats, in small groups in random order, so that the ratios mean something on a noisy machine. A random
tiny model, unless another is given: what is measured is waiting, not computing.

Goals: the p99 of TTFT at most 1.2 times as long with leases, and no block pinned afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp

from backhaul.display import open_display
from backhaul.stack import EngineSpec, Running, Stack
from bench.chat import percentile, scrape, stream_chat, user_message
from bench.stack import START_TIMEOUT, provenance
from tests.tiny import make_tiny

P99_GOAL = 1.2
GROUP = 10
"""Chats of one arm in a row."""
ANSWER = 24
WARM_UP = 20
SETTLING_SECONDS = 5.0
PINNED = "backhaul_engine_blocks_pinned"
LEASES = "backhaul_engine_leases"
OFFERS = "--kv-transfer-config.kv-connector-extra-config.bidirectional-kv-xfer"


@dataclass
class Arm:
    name: str
    stack: Running
    groups: list[list[float]] = field(default_factory=list)
    """Seconds to the first token, by group."""
    most_held: float = 0
    """Leases seen on the decode engine between two groups."""
    after: Counter[str] = field(default_factory=Counter)
    """The metrics of both engines at the end, added up."""

    @property
    def decode_url(self) -> str:
        return next(engine.url for engine in self.stack.engines if engine.role == "decode")


@asynccontextmanager
async def running_arm(name: str, model: Path, blocks: int, *, offers: bool) -> AsyncIterator[Arm]:
    """A stack of its own. Raises CommandError if it does not start."""
    with tempfile.TemporaryDirectory(prefix=f"backhaul-bench-{name}-") as path:
        folder = Path(path)
        common = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--max-model-len", "1024"]
        decode = ["--num-gpu-blocks-override", str(blocks), OFFERS, str(offers).lower()]
        engines = [EngineSpec("prefill", "prefill", common), EngineSpec("decode", "decode", [*common, *decode])]
        async with Stack(folder, folder, asyncio.Event(), log_level="warning") as stack:
            with open_display(io.StringIO()) as display:
                yield Arm(name, await stack.start(engines, ["--port", "0"], display, within=START_TIMEOUT))


async def load(session: aiohttp.ClientSession, arm: Arm, numbers: Sequence[int], concurrency: int) -> list[float]:
    """These chats, at most `concurrency` at once; seconds to the first token of each."""
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int) -> float:
        chooser = random.Random(number)
        body = {
            "model": arm.stack.model,
            "messages": [user_message(chooser, chooser.randrange(2, 9))],
            "max_tokens": ANSWER,
            "min_tokens": ANSWER,
            "temperature": 0,
        }
        async with slots:
            return (await stream_chat(session, arm.stack.base_url, body)).ttft

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in numbers]
    return [task.result() for task in tasks]


async def run(model: Path, args: argparse.Namespace) -> list[Arm]:
    async with (
        running_arm("leases", model, args.blocks, offers=True) as leases,
        running_arm("none", model, args.blocks, offers=False) as none,
        aiohttp.ClientSession() as session,
    ):
        arms, order = [leases, none], random.Random(0)
        for arm in arms:
            await load(session, arm, [-1 - n for n in range(WARM_UP)], args.concurrency)
        total = args.conversations * args.repeat
        for start in range(0, total, GROUP):
            numbers = range(start, min(start + GROUP, total))
            for arm in arms:
                arm.groups.append(await load(session, arm, numbers, args.concurrency))
                held = (await scrape(session, arm.decode_url))[f"{LEASES}_held"]
                arm.most_held = max(arm.most_held, held)
            order.shuffle(arms)
            print(f"{numbers[-1] + 1} of {total} chats", file=sys.stderr, flush=True)
        for arm in (leases, none):
            arm.after = await _settled(session, arm)
    return [leases, none]


async def _settled(session: aiohttp.ClientSession, arm: Arm) -> Counter[str]:
    """The engines' metrics once nothing is pinned, or after a while."""
    deadline = asyncio.get_running_loop().time() + SETTLING_SECONDS
    while True:
        metrics = Counter[str]()
        for engine in arm.stack.engines:
            metrics.update(await scrape(session, engine.url))
        assert PINNED in metrics, f"the engines have no metric {PINNED}"
        if not metrics[PINNED] or asyncio.get_running_loop().time() > deadline:
            return metrics
        await asyncio.sleep(0.1)


def figures(arm: Arm) -> dict[str, Any]:
    ttfts = list(chain(*arm.groups))
    halves = [percentile(list(chain(*arm.groups[half::2])), 0.99) for half in (0, 1)]
    return {
        "ttft_p50_seconds": percentile(ttfts, 0.5),
        "ttft_p99_seconds": percentile(ttfts, 0.99),
        "ttft_max_seconds": max(ttfts),
        "ttft_p99_between_halves": max(halves) / min(halves),
        "leases_held_at_most": int(arm.most_held),
        "leases_revoked": int(arm.after[f"{LEASES}_ended_total:revoked"]),
        "preemptions": int(arm.after["vllm:num_preemptions_total"]),
        "blocks_pinned_after": int(arm.after[PINNED]),
    }


def print_report(leases: dict[str, Any], none: dict[str, Any], args: argparse.Namespace) -> None:
    print(
        f"{args.conversations * args.repeat} chats that never return, {args.concurrency} at once, "
        f"decode pool of {args.blocks} blocks"
    )
    print(provenance())
    print(f"{'':22} {'leases':>9} {'no leases':>9} {'ratio':>7}")
    for name, unit in (("ttft_p50_seconds", "TTFT p50, ms"), ("ttft_p99_seconds", "TTFT p99, ms")):
        ratio = leases[name] / none[name]
        print(f"{unit:<22} {1e3 * leases[name]:>9.0f} {1e3 * none[name]:>9.0f} {ratio:>6.2f}x")
    for name in ("leases_held_at_most", "leases_revoked", "preemptions", "blocks_pinned_after"):
        print(f"{name.replace('_', ' '):<22} {leases[name]:>9} {none[name]:>9}")
    ratio = leases["ttft_p99_seconds"] / none["ttft_p99_seconds"]
    pinned = leases["blocks_pinned_after"]
    print(f"p99 with leases {ratio:.2f}x, goal at most {P99_GOAL}x: {'met' if ratio <= P99_GOAL else 'missed'}")
    print(f"Pinned afterwards {pinned} blocks, goal 0: {'met' if pinned == 0 else 'missed'}")
    noise = none["ttft_p99_between_halves"]
    print(f"Without leases the p99 of one half of the groups is {noise:.2f}x that of the other: so much is noise.")
    if not leases["leases_held_at_most"]:
        print("No lease was ever seen: this run says nothing about them.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="GGUF file or HF folder; default: a random tiny model")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=64, help="KV blocks of the decode engine")
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=2, help="how many times that number of conversations")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.conversations * args.repeat < 2 * GROUP:
        parser.error(f"at least {2 * GROUP} conversations")
    with tempfile.TemporaryDirectory(prefix="backhaul-bench-") as folder:
        model = args.model.absolute() if args.model else make_tiny(Path(folder) / "tiny")
        leases, none = (figures(arm) for arm in asyncio.run(run(model, args)))
    print_report(leases, none, args)
    if args.json:
        found = {"provenance": provenance(), "blocks": args.blocks, "leases": leases, "none": none}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

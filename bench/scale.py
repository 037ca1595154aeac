"""What many engines and many conversations cost a router, in parts: plans, looks, metrics, memory, Redis.

    python -m bench.scale [--engines 10,100,1000] [--conversations 1000000] [--plans 20000] [--records 20000]

*Plans* are made by the router's own pool and planner over engines that are only told of: half of them of each role, in
two versions, each with several requests, some of them suspect, full, ejected or draining. Each plan is one turn of a
conversation drawn from all; its engines get the turn, others end. Turns of all sorts alternate, and so do fleets of all
sizes, so that what the machine does meanwhile hits all alike. Goal: a median of 50 us with 1,000 engines.

*Records* are packed and saved by the router's own store in a real Valkey. A million conversations do not fit a small
machine: what they would take is that of `--records` of them, multiplied, and said to be so.

*The router* is the real process, looking at that many engines (one process that answers for all), with no turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import aiohttp
import psutil
from redis import Redis

from backhaul.valkey import start_valkey
from bench.router_parts import Launcher, Side, kept, launching, written
from bench.scale_fleet import MODEL, Fleet
from bench.stack import provenance
from connectors.wire.transfer import KVTransferParams
from router.conversation import KEY_PREFIX
from router.metrics import Metrics
from router.plan import Facts, make_plan
from router.record import Record
from router.store import Store

GOAL_US: Final = 50.0
LEAST_NEW: Final = 32
"""Tokens up to which a decode engine is left alone."""
BLOCK_SIZE: Final = 16
VOCABULARIES: Final = (49_152, 151_936)
LENGTHS: Final = (4_096, 32_768, 131_072)
FILL_TOKENS: Final = 4_096
AT_ONCE: Final = 32
IDLE_SECONDS: Final = 10.0
SCRAPES: Final = 5
STORE_MAXMEMORY: Final = "950mb"

T = TypeVar("T")


@dataclass
class Times:
    """Microseconds."""

    each: list[float] = field(default_factory=list)

    def take(self, work: Callable[[], T]) -> T:
        started = time.perf_counter_ns()
        done = work()
        self.each.append((time.perf_counter_ns() - started) / 1000)
        return done

    @property
    def median(self) -> float:
        return statistics.median(self.each)

    def __str__(self) -> str:
        ordered = sorted(self.each)
        return f"{self.median:8.1f} {ordered[int(0.99 * len(ordered))]:8.1f}"


# Plans.

SORTS: Final[dict[str, Callable[[Fleet], Facts]]] = {
    "new turn": Fleet.new,
    "new turn with a system message": Fleet.system_prompt,
    "follow-up": Fleet.follow_up,
    "follow-up whose engines are gone or busy": Fleet.homeless,
    "retry without the engines that failed": Fleet.follow_up,
}
RETRY: Final = "retry without the engines that failed"


def plans(fleets: dict[int, Fleet], num_plans: int) -> None:
    taken = {(sort, size): Times() for sort in SORTS for size in fleets}
    asking, looking = {size: Times() for size in fleets}, {size: Times() for size in fleets}
    machine = Times()
    for number in range(num_plans // len(SORTS)):
        if number % 10 == 0:
            machine.take(lambda: sum(map(abs, range(1000))))
        for sort, facts_of in SORTS.items():
            for size, fleet in fleets.items():
                facts, pool = facts_of(fleet), fleet.pool
                failed = (facts.last_prefill, facts.last_decode) if sort == RETRY else ()
                work = partial(
                    make_plan,
                    facts,
                    pool.rosters["prefill"],
                    pool.rosters["decode"],
                    draw=pool.draw,
                    avoid={url for url in failed if url is not None},
                    break_even=LEAST_NEW,
                    served=pool.remembered,
                )
                fleet.serve(taken[sort, size].take(work))
                looking[size].take(fleet.look)
        for size, fleet in fleets.items():
            facts = fleet.follow_up()
            rather = (facts.last_prefill, facts.last_decode)
            asking[size].take(partial(fleet.pool.one_ready, MODEL, rather=rather))
    print(f"\nMicroseconds, median and 99th percentile; 1000 times abs() took{machine}")
    print(f"{'':>42}" + "".join(f"{size:>9} engines " for size in fleets))
    for sort in SORTS:
        print(f"{sort:>42} " + " ".join(str(taken[sort, size]) for size in fleets))
    print(f"{'whom to ask for the ids of a prompt':>42} " + " ".join(str(asking[size]) for size in fleets))
    print(f"{'what a look finds is taken in':>42} " + " ".join(str(looking[size]) for size in fleets))
    worst = max(taken[sort, max(fleets)].median for sort in SORTS)
    met = "met" if worst <= GOAL_US else "missed"
    print(f"longest median with {max(fleets)}: {worst:.1f} us, goal {GOAL_US:.0f}: {met}")
    print("requests under way at the engines of a role that is ready, least, mean, most:")
    for size, fleet in fleets.items():
        loads = [one.in_flight for one in fleet.pool.decode if one.state == "ready"]
        print(f"{size:>8} engines: {min(loads)} {statistics.mean(loads):.1f} {max(loads)}")


# What conversations take in Redis.


def record(num_tokens: int, vocabulary: int) -> Record:
    ids = array("I", ((7919 * position) % vocabulary for position in range(num_tokens)))
    return Record(3, "http://10.1.0.1:8000", "http://10.2.0.1:8000", time.time() + 3600, ids)


def offer(num_tokens: int) -> KVTransferParams:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return KVTransferParams(
        do_remote_decode=True,
        remote_block_ids=[list(range(7, 7 + num_blocks))],
        remote_engine_id="4be2f6f0c9a44c12b6a2a5f5ab11d2f0",
        remote_request_id="chatcmpl-0123456789abcdef",
        remote_host="10.2.0.1",
        remote_port=8101,
        tp_size=1,
        remote_num_tokens=num_tokens,
        remote_block_size=BLOCK_SIZE,
        remote_block_hashes=[f"{2**64 * number + 12345:032x}" for number in range(num_blocks)],
        kv_layout="0123456789abcdef",
        remote_blocks_ttl=480.0,
    )


def key(number: int) -> str:
    return KEY_PREFIX + f"{number:032x}"


async def conversations(num_records: int, num_conversations: int, launcher: Launcher) -> None:
    server = await start_valkey(launcher.folder, launcher.folder / "store.log", maxmemory=STORE_MAXMEMORY)
    kept(launcher.stack, server.child, launcher.others)
    redis = Redis.from_url(server.url)
    store = Store(server.url, timeout=5.0, metrics=Metrics([]))
    try:
        print("\nBytes of a conversation in Redis (MEMORY USAGE), and of the same with another vocabulary")
        print(f"{'tokens':>8}" + "".join(f"{vocabulary:>12}" for vocabulary in VOCABULARIES) + "   of a million, GB")
        for num_tokens in LENGTHS:
            used: list[int] = []
            for vocabulary in VOCABULARIES:
                assert (await store.save(key(0), record(num_tokens, vocabulary), offer(num_tokens))).kept
                used.append(redis.memory_usage(key(0), samples=0) or 0)
            expected = " to ".join(f"{one * num_conversations / 1e9:.1f}" for one in used)
            print(f"{num_tokens:>8}" + "".join(f"{one:>12}" for one in used) + f"   {expected} (extrapolated)")
        redis.flushall()
        await _fill(store, redis, num_records, num_conversations)
    finally:
        redis.close()
        await store.close()


async def _fill(store: Store, redis: Redis, num_records: int, num_conversations: int) -> None:
    saved, blocks = record(FILL_TOKENS, VOCABULARIES[1]), offer(FILL_TOKENS)
    empty = redis.info("memory")["used_memory"]
    todo = iter(range(num_records))

    async def work() -> None:
        for number in todo:
            assert (await store.save(key(number), saved, blocks)).kept

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    seconds = time.perf_counter() - started
    each = (redis.info("memory")["used_memory"] - empty) / num_records
    print(
        f"{num_records} of {FILL_TOKENS} tokens: {each:.0f} bytes each, all told; {num_records / seconds:.0f} saves/s"
    )
    print(f"{num_conversations} of them (extrapolated): {each * num_conversations / 1e9:.1f} GB")
    claims = Times()
    for number in range(0, num_records, max(1, num_records // 1000)):
        started_ns = time.perf_counter_ns()
        assert await store.claim(key(number)) is not None
        claims.each.append((time.perf_counter_ns() - started_ns) / 1000)
    print(f"claims among them, one after the other, us:{claims}")


# The router process.


async def router(num_engines: int, store: str, launcher: Launcher) -> None:
    command = [sys.executable, "-m", "bench.scale_engines", "--engines", str(num_engines)]
    engines = await launcher.start(f"engines-{num_engines}", command, launcher.others)
    ports = json.loads(await written(engines, engines.log))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    pools = [flag for number, url in enumerate(urls) for flag in (("--prefill", "--decode")[number % 2], url)]
    ready = launcher.folder / f"router-{num_engines}.json"
    command = [sys.executable, "-m", "backhaul", "router", *pools, "--port", "0", "--drain-delay", "0"]
    started = time.monotonic()
    child = await launcher.start(
        f"router-{num_engines}",
        [*command, "--json-file", str(ready)],
        launcher.measured,
        BACKHAUL_ROUTER_REDIS=store,
    )
    side = Side(child, json.loads(await written(child, ready))["url"])
    async with aiohttp.ClientSession(side.url) as session:
        while await _num_ready(session) < num_engines:  # noqa: ASYNC110 it is another process
            await asyncio.sleep(0.1)
        all_ready = time.monotonic() - started
        await asyncio.sleep(3)
        share = await _share(side, IDLE_SECONDS)
        scrape = await _cost(side, session, "/metrics", share)
        status = await _cost(side, session, "/admin/status", share)
    print(
        f"{num_engines:>8} {all_ready:>10.1f} {side.rss_mib():>10.1f} {_num_files(side):>10} {100 * share:>10.1f} "
        f"{1e6 * share / num_engines:>14.0f} {scrape:>22} {status:>22}"
    )
    await child.stop(15)
    await engines.stop(5)


async def _num_ready(session: aiohttp.ClientSession) -> int:
    async with session.get("/ready") as answer:
        return sum(one["state"] == "ready" for one in (await answer.json())["engines"])


def _num_files(side: Side) -> int:
    return psutil.Process(side.child.pid).num_fds()


async def _share(side: Side, seconds: float) -> float:
    """Processor time per second, with nothing to do but to look at engines."""
    started, before = time.perf_counter(), side.cpu_seconds()
    await asyncio.sleep(seconds)
    return (side.cpu_seconds() - before) / (time.perf_counter() - started)


async def _cost(side: Side, session: aiohttp.ClientSession, path: str, idle: float) -> str:
    """Milliseconds of processor time for an answer, besides looks, and its size."""
    started, before, size = time.perf_counter(), side.cpu_seconds(), 0
    for _ in range(SCRAPES):
        async with session.get(path) as answer:
            size = len(await answer.read())
    spent = side.cpu_seconds() - before - idle * (time.perf_counter() - started)
    return f"{1000 * spent / SCRAPES:.0f} ms {size / 1024:.0f} KiB"


async def run(args: argparse.Namespace) -> None:
    sizes = [int(size) for size in args.engines.split(",")]
    print(provenance())
    if args.plans:
        plans({size: Fleet(size, args.conversations, seed=size) for size in sizes}, args.plans)
    async with launching() as launcher:
        if args.records:
            await conversations(args.records, args.conversations, launcher)
        if not args.no_router:
            store = await launcher.store()
            print("\nA router process that only looks at its engines, every 2 s at each")
            print(
                f"{'engines':>8} {'ready, s':>10} {'MiB':>10} {'files':>10} {'% of core':>10} {'us/s an engine':>14} "
                f"{'a scrape':>22} {'a status':>22}"
            )
            for size in sizes:
                await router(size, store, launcher)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--engines", default="10,100,1000", help="how many, prefill and decode together")
    parser.add_argument("--conversations", type=int, default=1_000_000)
    parser.add_argument("--plans", type=int, default=20_000, help="for each number of engines; 0: none")
    parser.add_argument("--records", type=int, default=20_000, help="of 4,096 tokens, to fill Redis with; 0: none")
    parser.add_argument("--no-router", action="store_true", help="leave out the router process")
    args = parser.parse_args()
    logging.getLogger("router").setLevel(logging.CRITICAL)
    gc.freeze()
    asyncio.run(run(args))


if __name__ == "__main__":
    main()

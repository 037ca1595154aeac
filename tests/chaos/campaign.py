"""Load and faults in rounds, with quiet points between them at which nothing may be left over."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio

from tests.chaos.crowd import Crowd, open_door
from tests.chaos.faults import Injector
from tests.chaos.fleet import LEASE_SECONDS, OFFER_SECONDS, Fleet
from tests.chaos.parts import Holding
from tests.chaos.results import Results
from tests.property.reference import Reference

SETTLE_SECONDS = OFFER_SECONDS + LEASE_SECONDS + 10
"""By then no lease, claim or offer is left of the turns before."""
IDLE_SECONDS = 3.0
"""Connections that wait for another request are closed by then."""
CALM_SECONDS = 4.0
"""Load after the last fault of a round."""
HELD = (
    "backhaul_engine_blocks_pinned",
    "backhaul_engine_leases_held",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
"""What an engine has none of when nothing runs."""
IN_FLIGHT = ("in_flight", "queued", "waiting")
"""In the names of a router's gauges that are 0 when nothing runs."""
ALLOWED = Holding(descriptors=4, threads=4, rss_mib=32.0, tasks=4, objects=20_000)
"""Growth of one process in a round. Turns differ from round to round, so caches do; a leak grows with the turns."""


@dataclass(frozen=True)
class Plan:
    seed: int
    seconds: float
    """Of each round."""
    rounds: int = 1
    clients: int = 20
    warm_up: float = 8.0
    pause: tuple[float, float] = (0.5, 3.0)
    """Seconds between two faults in a group of parts."""


async def campaign(fleet: Fleet, reference: Reference, plan: Plan, results: Results) -> None:
    """Play it all; what is found is in the results."""
    injector = Injector(fleet, plan.seed, plan.pause)
    begin, ties = time.monotonic(), reference.num_ties
    async with AsyncExitStack() as stack:
        doors = [await open_door(stack, router.url, router) for router in fleet.routers]
        crowd = Crowd(doors, reference, results, plan.seed, injector.lived, lambda a, b: _told(injector, a, b))
        await _load(crowd, plan.clients, plan.warm_up)
        before = await _holdings(fleet)
        for number in range(plan.rounds):
            # In the first of the two rounds that a process lives through it warms up; in the second it must not grow.
            spared = [part for part in fleet.parts if part.name.endswith(str(number // 2 % 2))]
            stop_faults, stop_load = asyncio.Event(), asyncio.Event()
            async with asyncio.TaskGroup() as group:
                load = group.create_task(crowd.run(plan.clients, stop_load))
                trouble = group.create_task(injector.run(stop_faults, spared=spared))
                await asyncio.sleep(plan.seconds)
                stop_faults.set()
                await trouble
                await asyncio.sleep(CALM_SECONDS)
                stop_load.set()
                await load
            await let_go(fleet, results)
            after = await _holdings(fleet)
            _compare(before, after, number, results)
            before = after
            print(results.text(), flush=True)
    await _check_store(fleet, results)
    check_logs(fleet, results)
    results.problems += injector.problems
    results.faults.update((fault.kind, fault.part) for fault in injector.faults)
    results.facts["seconds, starting and settling included"] = f"{time.monotonic() - begin:.0f}"
    results.facts["load average of the machine, of 15 minutes"] = f"{os.getloadavg()[2]:.1f}"
    results.facts |= {what: f"{seconds:.2f} s at most" for what, seconds in sorted(injector.slowest.items())}
    results.facts["ties between logits"] = str(reference.num_ties - ties)


async def _load(crowd: Crowd, num_clients: int, seconds: float) -> None:
    """Without faults."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(crowd.run(num_clients, stop))
        await asyncio.sleep(seconds)
        stop.set()


Samples = dict[str, tuple[int, Holding]]
"""By part: which process of it, and what that holds."""


async def _holdings(fleet: Fleet) -> Samples:
    """Where nobody asks any more."""
    await asyncio.sleep(IDLE_SECONDS)
    return {part.name: (part.generation, await part.holding()) for part in fleet.parts}


async def let_go(fleet: Fleet, results: Results) -> None:
    """Wait until nothing runs and nothing is held any more; what does not end is a result."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := await _left_over(fleet)) and time.monotonic() < deadline:  # noqa: ASYNC110 (it ends elsewhere)
        await asyncio.sleep(0.2)
    for goal, name, found in left:
        results.tally[goal] += 1
        results.problems.append(f"{goal}: {name}: {found}")


async def _left_over(fleet: Fleet) -> list[tuple[str, str, str]]:
    left = []
    for part in fleet.engines:
        samples = await fleet.metrics(part)
        if found := {name: samples[name] for name in HELD if samples[name]}:
            left.append(("blocks held at the end", part.name, str(found)))
    for part in fleet.routers:
        samples = await fleet.metrics(part)
        gauges = [name for name in samples if any(word in name.split("{")[0] for word in IN_FLIGHT)]
        assert "backhaul_router_turns_in_flight" in gauges
        if found := {name: samples[name] for name in gauges if samples[name]}:
            left.append(("turns in flight at the end", part.name, str(found)))
    return left


def _compare(before: Samples, after: Samples, number: int, results: Results) -> None:
    for name, (generation, then) in before.items():
        now_generation, now = after[name]
        if generation != now_generation:
            continue
        grown, excess = [], []
        for what in ("descriptors", "threads", "rss_mib", "tasks", "objects"):
            old, new, allowed = getattr(then, what), getattr(now, what), getattr(ALLOWED, what)
            if old is None or new is None:
                continue
            grown.append(f"{what} {old:g} → {new:g}" if what != "rss_mib" else f"RSS {old:.1f} → {new:.1f} MiB")
            if new - old > allowed:
                excess.append(what)
        results.growth.append(f"round {number + 1}, {name}: {', '.join(grown)}")
        if excess:
            results.problems.append(f"{name} has grown in {', '.join(excess)}: {', '.join(grown)}")


async def _check_store(fleet: Fleet, results: Results) -> None:
    for port in fleet.store_ports:
        async with redis.asyncio.Redis(host="127.0.0.1", port=port) as store:
            keys = [key async for key in store.scan_iter(count=1000)]
            forever = [key for key in keys if await store.pttl(key) == -1]
        results.tally["keys without TTL at the end"] += len(forever)
        results.problems += [f"the store at {port} keeps {key!r} for ever" for key in forever]


def check_logs(fleet: Fleet, results: Results) -> None:
    for part in fleet.parts:
        if (at := (log := part.log.read_text(errors="replace")).find("Traceback")) >= 0:
            count = log.count("Traceback")
            results.problems.append(
                f"{count} tracebacks in the log of {part.name}: {log[max(0, at - 500) : at + 3000]}"
            )


def _told(injector: Injector, start: float, end: float) -> str:
    """The faults of that time, by when they began and ended from its beginning."""
    told = [
        f"{fault.kind} of {fault.part} from {fault.start - start:+.1f}"
        + ("" if fault.end is None else f" to {fault.end - start:+.1f} s")
        for fault in injector.active(start - 2.0, end)
    ]
    return "; ".join(told) or "none"


def write(results: Results, report: Path | None) -> None:
    """The report as Markdown, and beside it as JSON."""
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(results.markdown())
        report.with_suffix(".json").write_text(results.as_json())

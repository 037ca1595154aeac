"""A rolling restart of every engine and router behind a load balancer, under load: nobody notices.

python -m tests.chaos.rolling [--times 3] [--clients 20] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.chaos.campaign import check_logs, let_go, write
from tests.chaos.crowd import Crowd, open_door
from tests.chaos.fleet import Fleet, fleet
from tests.chaos.haproxy import haproxy
from tests.chaos.parts import Part
from tests.chaos.results import Results
from tests.property.reference import Reference
from tests.property.talker import make_talker

WARM_UP_SECONDS = 3.0
BETWEEN_SECONDS = 1.0
"""From when a part is counted on again to the restart of the next."""


async def rolling(fleet: Fleet, reference: Reference, results: Results, *, clients: int, times: int = 1) -> None:
    """All engines, one after the other in each pool, then all routers; and again."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        balancer = haproxy(fleet.folder, fleet.routers)
        stack.callback(balancer.discard)
        await balancer.start(fleet.client)
        door = await open_door(stack, balancer.url)
        crowd = Crowd([door], reference, results, seed=times, manners=("patient", "patient", "patient", "slow"))
        async with asyncio.TaskGroup() as group:
            load = group.create_task(crowd.run(clients, stop))
            await asyncio.sleep(WARM_UP_SECONDS)
            for _ in range(times):
                await _restart_all(fleet, results)
            stop.set()
            await load
        await let_go(fleet, results)
    check_logs(fleet, results)


async def _restart_all(fleet: Fleet, results: Results) -> None:
    """The pools of engines at the same time, as those who deploy a new version of both do."""
    async with asyncio.TaskGroup() as group:
        for pool in (fleet.group("prefill"), fleet.group("decode")):
            group.create_task(_restart_in_turn(pool, fleet, results))
    await _restart_in_turn(fleet.routers, fleet, results)


async def _restart_in_turn(parts: list[Part], fleet: Fleet, results: Results) -> None:
    for part in parts:
        begin = time.monotonic()
        fleet.out[part.name] = "restart"
        code = await part.stop()
        if code != 0:
            results.problems.append(f"{part.name} ended with {code} after SIGTERM: {part.tail()}")
        ended = time.monotonic()
        await part.start(fleet.client)
        del fleet.out[part.name]
        while not await fleet.is_seen(part):  # noqa: ASYNC110 (it happens elsewhere)
            await asyncio.sleep(0.02)
        results.tally["parts restarted"] += 1
        results.facts[f"{part.name}: seconds from SIGTERM to its end, and on until it was counted on"] = (
            f"{ended - begin:.1f} + {time.monotonic() - ended:.1f}"
        )
        await asyncio.sleep(BETWEEN_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--report", type=Path, default=Path("build/chaos-rolling.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    results = Results(f"Rolling restart behind haproxy, {day}: {args.times} times, {args.clients} clients")
    with tempfile.TemporaryDirectory(prefix="backhaul-rolling-") as name:
        try:
            asyncio.run(_run(Path(name), results, args.clients, args.times))
        finally:
            write(results, args.report)
    print(results.text(), f"\nreport: {args.report}", sep="\n")
    return 0 if results.passed else 1


async def _run(folder: Path, results: Results, clients: int, times: int) -> None:
    model = make_talker(folder / "talker")
    reference = Reference(model)
    async with fleet(model, folder, sentinel=False, trouble=False) as started:
        await rolling(started, reference, results, clients=clients, times=times)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""How soon the router knows: from its start until it is ready, and when an engine crashes and comes back.

    python -m bench.recovery [--rounds 20]

A real router over stub engines, nothing else to do. A decode engine is killed and started again on its port; the router
is asked every 5 ms what it thinks. Goals: ready below 1 s, out of rotation below 1 s, back below 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import aiohttp

from backhaul import processes
from backhaul.processes import Child
from backhaul.valkey import start_valkey
from bench.native.build import build
from bench.router_parts import kept, written
from bench.stack import provenance

WAIT_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.005
GOALS: Final = {"start to ready": 1.0, "crash to out of rotation": 1.0, "restart to back": 5.0}


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> float:
    """Seconds until it holds."""
    began = time.perf_counter()
    while not await holds():
        if time.perf_counter() - began > WAIT_SECONDS:
            raise SystemExit(f"not within {WAIT_SECONDS:.0f} s: {what}")
        await asyncio.sleep(LOOK_SECONDS)
    return time.perf_counter() - began


class Looker:
    """Asks a router what it thinks of its engines."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def is_ready(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def takes(self, engine: str) -> bool:
        async with self._session.get(f"{self._url}/ready") as answer:
            engines = (await answer.json())["engines"]
        return any(one["url"] == engine and one["state"] == "ready" for one in engines)


async def measure(rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in GOALS}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="backhaul-bench-")))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        store = await start_valkey(folder, folder / "store.log")
        kept(stack, store.child)

        async def start(name: str, *command: str) -> Child:
            child = await processes.start(name, command, log=folder / f"{name}.log")
            return kept(stack, child)

        async def start_engine(name: str, port: str = "0") -> tuple[Child, str]:
            (folder / f"{name}.log").unlink(missing_ok=True)
            child = await start(name, str(build("stub_engine")), "--port", port)
            return child, (await written(child, child.log)).strip()

        ports = [(await start_engine(name))[1] for name in ("prefill", "other")]
        crashing, port = await start_engine("crashing")
        urls = [f"http://127.0.0.1:{port}" for port in (*ports, port)]
        pools = ["--prefill", urls[0], "--decode", urls[1], "--decode", urls[2]]
        for number in range(rounds):
            file = folder / f"router-{number}.json"
            command = [*("backhaul", "router", *pools), "--redis", store.url, "--port", str(40000 + number)]
            looker = Looker(session, f"http://127.0.0.1:{40000 + number}")
            began = time.perf_counter()
            router = await start(f"router-{number}", sys.executable, "-m", *command, "--json-file", str(file))
            await until(looker.is_ready, "the router is ready")
            seconds["start to ready"].append(time.perf_counter() - began)
            await until(lambda looker=looker: looker.takes(urls[2]), "the engine is ready")  # type: ignore[misc]
            await asyncio.sleep(0.7)  # wherever it is between two looks
            crashing.process.send_signal(signal.SIGKILL)

            async def is_out(looker: Looker = looker) -> bool:
                return not await looker.takes(urls[2])

            seconds["crash to out of rotation"].append(await until(is_out, "it is out of rotation"))
            await asyncio.sleep(1.0 + number % 3)  # the longer it is away, the less often it is looked at
            crashing, _ = await start_engine("crashing", port)
            back = await until(lambda looker=looker: looker.takes(urls[2]), "it is back")  # type: ignore[misc]
            seconds["restart to back"].append(back)
            await router.stop(10.0)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    seconds = asyncio.run(measure(args.rounds))
    print(provenance())
    print(f"\n| {args.rounds} rounds | median, s | longest, s | goal, s | |\n| --- | ---: | ---: | ---: | --- |")
    for name, goal in GOALS.items():
        median, longest = statistics.median(seconds[name]), max(seconds[name])
        print(f"| {name} | {median:.2f} | {longest:.2f} | {goal:.0f} | {'met' if longest < goal else 'missed'} |")


if __name__ == "__main__":
    main()

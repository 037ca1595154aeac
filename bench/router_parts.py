"""The processes of `bench.router`: Valkey, two stub engines, the router, and the proxy it is compared with.

Router and proxy have one core to themselves; everything else shares another.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import psutil

from backhaul import processes
from backhaul.processes import Child, ChildDied
from backhaul.valkey import start_valkey
from bench.native.build import build
from connectors.wire.seal import new_key

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 15.0
LOAD_SECONDS: Final = 30.0
"""How long a load generator may take beyond the time it asks for."""

SideName = Literal["backhaul", "passthrough"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared."""

    child: Child
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.child.pid).cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Load:
    """What a load generator has seen; times in milliseconds."""

    seconds: float
    good: int
    bad: int
    events: int
    p50_ms: float
    p99_ms: float
    first_p50_ms: float
    first_p99_ms: float


@dataclass(frozen=True, slots=True)
class Parts:
    folder: Path
    prefill: int
    decode: int
    """Ports of the stub engines."""
    sides: dict[SideName, Side]
    core: int | None
    """Of everything but the two sides; None if there is only one."""

    async def load(self, port: int, body: Any, *flags: str | int | float) -> Load:
        """Run the load generator with these flags against this port, until it has ended."""
        path = self.folder / "body.json"
        path.write_text(json.dumps(body, separators=(",", ":")))
        command = [str(build("load")), "--port", str(port), "--body", str(path), *map(str, flags)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            _pin(process.pid, self.core)
            seconds = float(flags[flags.index("--seconds") + 1])
            printed, _ = await asyncio.wait_for(process.communicate(), seconds + LOAD_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return Load(**json.loads(printed))

    async def ready(self) -> None:
        """Wait until the router has seen both engines."""
        deadline = time.monotonic() + START_SECONDS
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(self.sides["backhaul"].url + "/ready") as answer:
                    if answer.status == 200:
                        return
                if time.monotonic() > deadline:
                    raise SystemExit(f"the router was not ready within {START_SECONDS:.0f} s")
                await asyncio.sleep(0.02)

    async def counters(self) -> dict[str, float]:
        """What the router has counted, by the name and labels of each series."""
        async with aiohttp.ClientSession() as session, session.get(self.sides["backhaul"].url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


@asynccontextmanager
async def running_parts(*, chunks: int, interval_us: int, profiles: Path | None = None) -> AsyncIterator[Parts]:
    """Everything up and ready; `profiles`: the folder that gets a profile of each side when it has ended."""
    cores = sorted(os.sched_getaffinity(0))
    ours, others = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="backhaul-bench-")))

        async def start(name: str, command: Sequence[str], core: int | None, **env: str) -> Child:
            return kept(stack, await processes.start(name, command, log=folder / f"{name}.log", env=env), core)

        store = await start_valkey(folder, folder / "store.log")
        kept(stack, store.child, others)
        stub = [str(build("stub_engine")), "--chunks", str(chunks), "--interval-us", str(interval_us)]
        engines = [await start(role, stub, others) for role in ("prefill", "decode")]
        ports = [int(await written(engine, engine.log)) for engine in engines]
        pools = ["--prefill", f"http://127.0.0.1:{ports[0]}", "--decode", f"http://127.0.0.1:{ports[1]}"]
        commands: dict[SideName, list[str]] = {
            "backhaul": ["backhaul", "router", *pools, "--port", "0", "--drain-delay", "0", "--json-file"],
            "passthrough": ["bench.passthrough", *pools, "--json"],
        }
        secrets = {"BACKHAUL_ROUTER_SEAL_KEY": new_key(), "BACKHAUL_ROUTER_REDIS": store.url}
        sides: dict[SideName, Side] = {}
        for name, command in commands.items():
            ready = folder / f"{name}.json"
            profiled = [] if profiles is None else ["bench.profiled", str(profiles / name)]
            child = await start(name, [sys.executable, "-m", *profiled, *command, str(ready)], ours, **secrets)
            sides[name] = Side(child, json.loads(await written(child, ready))["url"])
        parts = Parts(folder, ports[0], ports[1], sides, others)
        await parts.ready()
        yield parts


def kept(stack: AsyncExitStack, child: Child, core: int | None = None) -> Child:
    """Have the child stopped in the end, and stay on its core."""
    stack.push_async_callback(child.stop, STOP_SECONDS)
    _pin(child.pid, core)
    return child


def _pin(pid: int, core: int | None) -> None:
    if core is not None:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(pid, {core})


async def written(child: Child, file: Path) -> str:
    """What a child has written here, as soon as it has."""
    deadline = time.monotonic() + START_SECONDS
    while not (text := _text(file)):
        if child.process.returncode is not None:
            raise ChildDied(child)
        if time.monotonic() > deadline:
            raise SystemExit(f"{child.name} did not start within {START_SECONDS:.0f} s")
        await asyncio.sleep(0.02)
    return text


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""

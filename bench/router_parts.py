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
        times = [process.cpu_times() for process in self._processes()]
        return float(sum(one.user + one.system for one in times))

    def rss_mib(self) -> float:
        return float(sum(process.memory_info().rss for process in self._processes()) / 2**20)

    def _processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.child.pid)
        return [main, *main.children(recursive=True)]


@dataclass(frozen=True, slots=True)
class Load:
    """What a load generator has seen; times in milliseconds."""

    seconds: float
    good: int
    bad: int
    events: int
    event_seconds: float
    """From the first event of all to the last."""
    p50_ms: float
    p99_ms: float
    first_p50_ms: float
    first_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_mean_ms: float
    """Between two events of a stream."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts what a benchmark needs, until its stack is closed."""

    stack: AsyncExitStack
    folder: Path
    measured: int | None
    """The core of what is measured, and that of everything else; None if there is only one."""
    others: int | None

    async def start(self, name: str, command: Sequence[str], core: int | None, **env: str) -> Child:
        child = await processes.start(name, command, log=self.folder / f"{name}.log", env=env)
        return kept(self.stack, child, core)

    async def store(self) -> str:
        """The URL of a Valkey."""
        store = await start_valkey(self.folder, self.folder / "store.log")
        kept(self.stack, store.child, self.others)
        return store.url

    async def engine(self, name: str, *flags: str | int) -> int:
        """The port of a stub engine with these flags."""
        engine = await self.start(name, [str(build("stub_engine")), *map(str, flags)], self.others)
        return int(await written(engine, engine.log))

    async def load(self, port: int, body: Any, *flags: str | int | float) -> Load:
        """Run the load generator with these flags against this port, until it has ended."""
        path = self.folder / "body.json"
        path.write_text(json.dumps(body, separators=(",", ":")))
        command = [str(build("load")), "--port", str(port), "--body", str(path), *map(str, flags)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            _pin(process.pid, self.others)
            given = sum(float(flags[flags.index(name) + 1]) for name in ("--seconds", "--patience") if name in flags)
            printed, _ = await asyncio.wait_for(process.communicate(), given + LOAD_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return Load(**json.loads(printed))


@asynccontextmanager
async def launching() -> AsyncIterator[Launcher]:
    cores = sorted(os.sched_getaffinity(0))
    ours, others = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="backhaul-bench-"))
        yield Launcher(stack, Path(folder), ours, others)


@dataclass(frozen=True, slots=True)
class Parts:
    launcher: Launcher
    prefill: int
    decode: int
    """Ports of the stub engines."""
    sides: dict[SideName, Side]

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
    async with launching() as launcher:
        store = await launcher.store()
        flags = ("--chunks", chunks, "--interval-us", interval_us)
        ports = [await launcher.engine(role, *flags) for role in ("prefill", "decode")]
        pools = ["--prefill", f"http://127.0.0.1:{ports[0]}", "--decode", f"http://127.0.0.1:{ports[1]}"]
        commands: dict[SideName, list[str]] = {
            "backhaul": ["backhaul", "router", *pools, "--port", "0", "--drain-delay", "0", "--json-file"],
            "passthrough": ["bench.passthrough", *pools, "--json"],
        }
        secrets = {"BACKHAUL_ROUTER_SEAL_KEY": new_key(), "BACKHAUL_ROUTER_REDIS": store}
        sides: dict[SideName, Side] = {}
        for name, command in commands.items():
            ready = launcher.folder / f"{name}.json"
            python = [sys.executable, "-m", *([] if profiles is None else ["bench.profiled", str(profiles / name)])]
            child = await launcher.start(name, [*python, *command, str(ready)], launcher.measured, **secrets)
            sides[name] = Side(child, json.loads(await written(child, ready))["url"])
        parts = Parts(launcher, ports[0], ports[1], sides)
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

"""A long-living process of the fleet, at an address that stays the same however often it is started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp
import psutil

from tests.chaos.trouble import Trouble
from tests.property.launcher import CENSUS_PORT
from tests.valkey import free_port

Group = Literal["prefill", "decode", "router", "store", "balancer"]

START_SECONDS = 120.0
"""As long as a start may take on a machine that has much else to do."""
END_SECONDS = 90.0
"""From SIGTERM to the end: draining has its own limits, which are below it."""
LOG_TAIL = 2000


@dataclass(frozen=True)
class Holding:
    """What a process holds at one time."""

    descriptors: int
    threads: int
    rss_mib: float
    tasks: int | None = None
    """asyncio's, not done; None for a process that is not ours."""
    objects: int | None = None


@dataclass
class Part:
    name: str
    group: Group
    command: list[str]
    port: int
    folder: Path
    ready_path: str | None = None
    """What answers 200 once it serves; None: it is enough that it listens."""
    trouble: Trouble | None = None
    """The network in front of it, which refuses connections while it is not there."""
    environment: dict[str, str] = field(default_factory=dict)
    census: int = field(default_factory=free_port)
    """Port at which a process of ours tells what it holds."""
    is_ours: bool = True
    process: subprocess.Popen[bytes] | None = None
    generation: int = 0
    """How often it has been started."""
    spawned: float = 0.0
    """When it was started last."""
    meant_to_run: bool = False
    is_serving: bool = False
    """It was ready, and has not been told to end, nor has it ended since."""
    ends: list[float] = field(default_factory=list)
    """When each process of it ended, or was told to, in time.monotonic()."""

    @property
    def url(self) -> str:
        """Its own address, without any trouble."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def seen_url(self) -> str:
        """The address that routers have of it."""
        return self.trouble.url if self.trouble is not None else self.url

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}.log"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def spawn(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
                | ({CENSUS_PORT: str(self.census)} if self.is_ours else {})
                | self.environment,
            )
        self.spawned = time.monotonic()
        self.generation += 1
        self.meant_to_run = True

    async def start(self, client: aiohttp.ClientSession) -> None:
        """Have it run and serve."""
        self.spawn()
        await self.serve(client)

    async def serve(self, client: aiohttp.ClientSession) -> None:
        """Wait until it does."""
        deadline = time.monotonic() + START_SECONDS
        while not await self.serves(client):
            assert self.runs, f"{self.name} ended while starting: {self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} does not serve after {START_SECONDS} s: {self.tail()}"
            await asyncio.sleep(0.02)
        self.is_serving = True
        if self.trouble is not None:
            await self.trouble.listen()

    async def serves(self, client: aiohttp.ClientSession) -> bool:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            if self.ready_path is None:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return True
            async with client.get(self.url + self.ready_path, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        return False

    async def kill(self) -> None:
        assert self.process is not None
        self.meant_to_run = self.is_serving = False
        self.ends.append(time.monotonic())
        self.process.kill()
        await self._gone(END_SECONDS)

    async def stop(self) -> int:
        """SIGTERM; returns its exit code."""
        assert self.process is not None
        self.meant_to_run = self.is_serving = False
        self.ends.append(time.monotonic())
        self.process.terminate()
        return await self._gone(END_SECONDS)

    async def _gone(self, seconds: float) -> int:
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"{self.name} still ran {seconds} s after it was told to end: {self.tail()}")
            await asyncio.sleep(0.01)
        self.ends.append(time.monotonic())
        if self.trouble is not None:
            await self.trouble.refuse()
        return code

    async def lost(self) -> None:
        """It has ended by itself."""
        self.meant_to_run = self.is_serving = False
        await self._gone(0)

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def ended_since(self, begin: float) -> bool:
        return any(end >= begin for end in self.ends)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]

    async def holding(self) -> Holding:
        assert self.process is not None
        process = psutil.Process(self.process.pid)
        told: dict[str, int] = {}
        if self.is_ours:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.census)
            told = json.loads(await reader.read())
            writer.close()
        rss = process.memory_info().rss / (1 << 20)
        return Holding(process.num_fds(), process.num_threads(), rss, **told)

    def discard(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

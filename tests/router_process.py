"""A router as a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.router_harness import CHAT, until

MAIN = "import sys; from router.config import RouterConfig; from router.run import run_router; "
RUN = MAIN + "sys.exit(run_router(RouterConfig.model_validate_json(sys.argv[1])))"
STREAM = {**CHAT, "stream": True}


@dataclass
class Running:
    process: asyncio.subprocess.Process
    client: aiohttp.ClientSession
    url: str = ""

    async def end(self, within: float) -> int:
        return await asyncio.wait_for(self.process.wait(), within)

    async def ready(self) -> int:
        async with self.client.get(self.url + "/ready") as answer:
            return answer.status

    async def stream(self) -> str:
        async with self.client.post(self.url + "/v1/chat/completions", json=STREAM) as answer:
            return (await answer.read()).decode()


@asynccontextmanager
async def started(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    """The process just begun; `listening` waits for it."""
    config = {"port": 0, "json_file": str(folder / "router.json"), "redis": "redis://127.0.0.1:1/0", **settings}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, json.dumps(config), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client:
            yield Running(process, client)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def listening(router: Running, folder: Path) -> None:
    file = folder / "router.json"
    await until(file.exists, "the router listens", 20)
    facts = json.loads(file.read_text())
    assert facts["pid"] == router.process.pid
    router.url = facts["url"]
    deadline = time.monotonic() + 10
    while await router.ready() != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)

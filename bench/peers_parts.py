"""The routers of `bench.peers`, each in front of stub engines that speak as its own engines do.

Backhaul's are of its own kind and do all that it asks of them: hashes of blocks, token ids, blocks that are offered to
the next turn. vllm-router's speak as vLLM does without bidirectional transfer: less to read and to write. sglang-router
sends both legs at once, which name a place to meet instead of blocks: comparable in work, not in protocol. Its prefill
engine ends after one token, as SGLang's does; until then the router holds the answer back.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import aiohttp

from backhaul.processes import ChildDied
from bench.router import Case
from bench.router_parts import START_SECONDS, Launcher, Side, launching, written
from connectors.wire.seal import new_key

EngineKind = Literal["backhaul", "vllm"]

BACKHAUL: Final = "Backhaul"
VLLM_ROUTER: Final = "vllm-router"
SGLANG_ROUTER: Final = "sglang-router"
PREFILL_ENGINE: Final = "prefill engine"
DECODE_ENGINE: Final = "decode engine"
TRY: Final = Case("try", "a first request, to see whether all is there", 60)


@dataclass(frozen=True, slots=True)
class Peer:
    """A router from PyPI, in a virtual environment of its own."""

    name: str
    venv: Path

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    def version(self) -> str:
        asked = f"from importlib.metadata import version; print(version({self.name!r}))"
        done = subprocess.run([self.python, "-c", asked], capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            raise SystemExit(f"{self.venv} has no {self.name}: pip install it there")
        return done.stdout.strip()

    def command(self, port: int, prefill: str, decode: str) -> list[str]:
        """What serves this port; as quiet as it gets, everything else as it comes."""
        place = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        flags = [*place, "--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--log-level"]
        if self.name == VLLM_ROUTER:
            return [self.python, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", *flags, "warning"]
        return [self.python, "-m", "sglang_router.launch_router", "--pd-disaggregation", *flags, "warn"]


@dataclass(frozen=True, slots=True)
class Stage:
    """All that runs: the routers by their names, and the engines of the first."""

    launcher: Launcher
    sides: dict[str, Side]
    prefill: int
    decode: int
    """Ports of Backhaul's stub engines."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part."""

    peers: Sequence[Peer] = ()
    engines: EngineKind = "backhaul"
    """Behind Backhaul."""

    @property
    def names(self) -> list[str]:
        return [BACKHAUL, *(peer.name for peer in self.peers)]


@asynccontextmanager
async def on_stage(cast: Cast, *, chunks: int, interval_us: int, processes: Sequence[int] = ()) -> AsyncIterator[Stage]:
    """Everything up and ready. With `processes`: no peers, but Backhaul with so many processes each, on all cores."""
    async with launching() as launcher:
        store = await launcher.store()

        async def engines(whose: str, kind: EngineKind, prefill_chunks: int = chunks) -> tuple[int, int]:
            flags = ("--kind", kind, "--interval-us", interval_us, "--chunks")
            prefill = await launcher.engine(f"{whose}-prefill", *flags, prefill_chunks)
            return prefill, await launcher.engine(f"{whose}-decode", *flags, chunks)

        prefill, decode = await engines(BACKHAUL, cast.engines)
        sides: dict[str, Side] = {}
        for num in processes or (1,):
            name = f"{BACKHAUL} x {num}" if processes else BACKHAUL
            sides[name] = await _start_backhaul(launcher, name, store, prefill, decode, num, spread=bool(processes))
        for peer in () if processes else cast.peers:
            ports = await engines(peer.name, "vllm", 1 if peer.name == SGLANG_ROUTER else chunks)
            sides[peer.name] = await _start_peer(launcher, peer, *ports)
        for name, side in sides.items():
            await _answers(name, side)
        yield Stage(launcher, sides, prefill, decode)


async def _start_backhaul(
    launcher: Launcher, name: str, store: str, prefill: int, decode: int, num: int, *, spread: bool
) -> Side:
    ready = launcher.folder / f"{name}.json"
    pools = ["--prefill", _url(prefill), "--decode", _url(decode), "--processes", str(num)]
    command = [sys.executable, "-m", "backhaul", "router", *pools, "--port", "0", "--drain-delay", "0"]
    secrets = {"BACKHAUL_ROUTER_SEAL_KEY": new_key(), "BACKHAUL_ROUTER_REDIS": store}
    core = None if spread else launcher.measured
    child = await launcher.start(name, [*command, "--json-file", str(ready)], core, **secrets)
    return Side(child, json.loads(await written(child, ready))["url"])


async def _start_peer(launcher: Launcher, peer: Peer, prefill: int, decode: int) -> Side:
    port = free_port()
    command = peer.command(port, _url(prefill), _url(decode))
    child = await launcher.start(peer.name, command, launcher.measured)
    return Side(child, _url(port))


async def _answers(name: str, side: Side) -> None:
    """Wait until a turn through this router is answered, and then until it has nothing more to do at its start."""
    deadline = time.monotonic() + START_SECONDS
    why = "it does not listen"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            if side.child.process.returncode is not None:
                raise ChildDied(side.child)
            try:
                async with session.post(side.url + TRY.path, json=TRY.body) as answer:
                    if answer.status == 200:
                        await asyncio.sleep(1.0)
                        return
                    why = f"{answer.status} {(await answer.text())[:200]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            await asyncio.sleep(0.1)
    raise SystemExit("\n".join([f"{name} answered no turn within {START_SECONDS:.0f} s: {why}", *side.child.tail()]))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

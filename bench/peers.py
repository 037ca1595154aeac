"""Backhaul's router beside those of vLLM and SGLang, written in Rust: speed, delay, streams, memory, in one run.

    python -m bench.peers --vllm-router VENV --sglang-router VENV [--sections NAME,…] [--rounds 3] [--soak 600]

VENV: a virtual environment of its own, with `vllm-router` (0.1.17) or `sglang-router` (0.3.2) from PyPI. Who is not
given does not take part. Each router has the first core to itself while it is measured; engines and load generator, C
programs without a model (`bench/native/`), are on the second. Within a round the routers take turns, and who goes first
changes; a ratio is that of turns per second of processor time in the same round. The sections:

    saturation  32 connections that always ask. Conversation state off: completions without a name, of which Backhaul
                keeps nothing. On: chats with a name, looked up in a real Valkey before and saved in it after; first
                turns, and later ones, for which it compares token ids and offers blocks besides
    latency     50 turns a second; "added" is what is more than the prefill and the decode engine take when asked
                directly, one after the other; what state costs is told by completions with a name and without
    streams     64 streams, 20 ms and 1 ms between events
    open        1,000 open streams, begun within 5 s, half a second between events; memory before and meanwhile
    processes   Backhaul with --processes 2 on both cores, beside 1, engines and load generator there as well
    soak        turns with state for so long as --soak says, told every 30 s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, get_args

from bench.native.build import BuildError
from bench.peers_parts import (
    BACKHAUL,
    DECODE_ENGINE,
    PREFILL_ENGINE,
    SGLANG_ROUTER,
    VLLM_ROUTER,
    Cast,
    EngineKind,
    Peer,
    Stage,
    on_stage,
)
from bench.peers_report import Sample, print_report
from bench.router import CHUNKS, CONNECTIONS, WARM_UP_SECONDS, Case
from bench.router_parts import Load
from bench.stack import provenance

OFF: Final = Case("off", "state off, small body", 60, chat=False)
KEPT: Final = Case("kept", "the same with a name, so that state is kept", 60, chat=False, named=True)
ON: Final = Case("on", "state on, first turns, small body", 60, named=True)
LATER: Final = Case("later", "state on, later turns, body of 6 KB", 6_000, named=True, goes_on=True)
OFF_30K: Final = Case("off-30k", "state off, body of 30 KB", 30_000, chat=False)
ON_30K: Final = Case("on-30k", "state on, first turns, body of 30 KB", 30_000, named=True)
STREAM: Final = Case("stream", "a named chat's stream", 60, stream=True, named=True)

RATE: Final = 50.0
NUM_STREAMS: Final = 64
STREAMS_US: Final = {20_000: 300, 1_000: 5_000}
"""Microseconds between events, and how many there are in a stream."""
OPEN_RATE: Final = 200.0
OPEN_SECONDS: Final = 5.0
"""In which 1,000 streams begin; all of them last longer."""
OPEN_US: Final = 500_000
OPEN_CHUNKS: Final = 24
STREAMS_PATIENCE: Final = 60
IDLE_SECONDS: Final = 2.0
RSS_SECONDS: Final = 1.0
"""Between two looks at a router's memory."""
SOAK_WINDOW: Final = 30.0


@dataclass
class Bench:
    cast: Cast
    seconds: float
    """Of each measurement of speed."""
    latency_seconds: float
    rounds: int
    soak: float
    """Seconds."""
    samples: list[Sample] = field(default_factory=list)
    idle_mib: dict[str, float] = field(default_factory=dict)
    """Memory of each before anybody asked it more than to be ready."""
    _first: int = 0

    async def saturation(self) -> None:
        await self._compare("saturation", (OFF, ON, LATER, OFF_30K, ON_30K))

    async def latency(self) -> None:
        flags = ("--rate", RATE, "--seconds", self.latency_seconds)
        async with on_stage(self.cast, chunks=CHUNKS, interval_us=1000) as stage:
            for number in range(self.rounds):
                for name, port in ((PREFILL_ENGINE, stage.prefill), (DECODE_ENGINE, stage.decode)):
                    await self._ask_directly("latency", stage, name, port, OFF, *flags)
                for case in (OFF, KEPT, ON):
                    for name in in_turn(stage, number):
                        await self._ask("latency", stage, name, case, *flags)

    async def streams(self) -> None:
        flags = ("--connections", NUM_STREAMS, "--seconds", 0, "--patience", STREAMS_PATIENCE)
        for interval_us, chunks in STREAMS_US.items():
            section = f"streams-{interval_us // 1000}ms"
            async with on_stage(self.cast, chunks=chunks, interval_us=interval_us) as stage:
                for number in range(self.rounds):
                    await self._ask_directly(section, stage, DECODE_ENGINE, stage.decode, STREAM, *flags)
                    for name in in_turn(stage, number):
                        await self._ask(section, stage, name, STREAM, *flags)

    async def open(self) -> None:
        flags = ("--rate", OPEN_RATE, "--seconds", OPEN_SECONDS, "--patience", STREAMS_PATIENCE)
        async with on_stage(self.cast, chunks=OPEN_CHUNKS, interval_us=OPEN_US) as stage:
            await asyncio.sleep(IDLE_SECONDS)
            self.idle_mib = {name: side.rss_mib() for name, side in stage.sides.items()}
            for name in stage.sides:
                await self._ask("open", stage, name, STREAM, *flags)

    async def processes(self) -> None:
        await self._compare("processes", (OFF, ON), processes=(1, 2))

    async def soaked(self) -> None:
        if not self.soak:
            return
        flags = ("--connections", CONNECTIONS, "--seconds", SOAK_WINDOW)
        async with on_stage(Cast(engines=self.cast.engines), chunks=CHUNKS, interval_us=1000) as stage:
            for _ in range(round(self.soak / SOAK_WINDOW)):
                await self._ask("soak", stage, BACKHAUL, ON, *flags)

    async def _compare(self, section: str, cases: Sequence[Case], processes: Sequence[int] = ()) -> None:
        async with on_stage(self.cast, chunks=CHUNKS, interval_us=1000, processes=processes) as stage:
            for case in cases:  # to warm up
                for name in stage.sides:
                    await self._load(stage, stage.sides[name].port, case, *always(WARM_UP_SECONDS))
            for number in range(self.rounds):
                for case in cases:
                    for name in in_turn(stage, number):
                        await self._ask(section, stage, name, case, *always(self.seconds))

    async def _ask(self, section: str, stage: Stage, name: str, case: Case, *flags: str | float) -> None:
        side = stage.sides[name]
        before, rss_mib = side.cpu_seconds(), 0.0
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(self._load(stage, side.port, case, *flags))
            while not loading.done():
                rss_mib = max(rss_mib, side.rss_mib())
                await asyncio.wait([loading], timeout=RSS_SECONDS)
        spent = side.cpu_seconds() - before
        self.samples.append(Sample(section, case.name, name, loading.result(), spent, rss_mib))

    async def _ask_directly(
        self, section: str, stage: Stage, name: str, port: int, case: Case, *flags: str | float
    ) -> None:
        self.samples.append(Sample(section, case.name, name, await self._load(stage, port, case, *flags)))

    async def _load(self, stage: Stage, port: int, case: Case, *flags: str | float) -> Load:
        self._first += 500_000  # no request's number comes twice
        numbers = ("--number", "connection") if case.goes_on else ("--first", self._first)
        return await stage.launcher.load(port, case.body, "--path", case.path, *flags, *numbers)


def always(seconds: float) -> tuple[str | float, ...]:
    return ("--connections", CONNECTIONS, "--seconds", seconds)


def in_turn(stage: Stage, number: int) -> list[str]:
    """The sides; in each round another goes first."""
    names = list(stage.sides)
    first = number % len(names)
    return names[first:] + names[:first]


async def measure(bench: Bench, sections: Sequence[str]) -> None:
    for section in sections:
        started = time.monotonic()
        await SECTIONS[section](bench)
        print(f"{section}: {time.monotonic() - started:.0f} s", file=sys.stderr)


SECTIONS: Final[Mapping[str, Callable[[Bench], Awaitable[None]]]] = {
    "saturation": Bench.saturation,
    "latency": Bench.latency,
    "streams": Bench.streams,
    "open": Bench.open,
    "processes": Bench.processes,
    "soak": Bench.soaked,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm-router", type=Path, metavar="VENV", help="virtual environment that has vllm-router")
    parser.add_argument("--sglang-router", type=Path, metavar="VENV", help="virtual environment that has sglang-router")
    parser.add_argument("--engines", choices=get_args(EngineKind), default="backhaul", help="stub engines of Backhaul")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="with commas between them")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of speed")
    parser.add_argument("--latency-seconds", type=float, default=10.0, help="of each of delay, at 50 turns a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0, help="seconds; 0: none")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    args = parser.parse_args()
    if unknown := set(args.sections.split(",")) - SECTIONS.keys():
        parser.error(f"unknown section: {', '.join(sorted(unknown))}")
    given = {VLLM_ROUTER: args.vllm_router, SGLANG_ROUTER: args.sglang_router}
    peers = [Peer(name, venv) for name, venv in given.items() if venv is not None]
    print(f"{provenance()} · load {os.getloadavg()[0]:.2f} before")
    for name in given:
        told = next((peer.version() for peer in peers if peer.name == name), "not given, takes no part")
        print(f"{name}: {told}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # 1,000 streams are 2,000 connections
    bench = Bench(Cast(peers, args.engines), args.seconds, args.latency_seconds, args.rounds, args.soak)
    try:
        asyncio.run(measure(bench, args.sections.split(",")))
    except BuildError as error:
        parser.exit(1, f"{error}\n")
    finally:
        if args.json:
            measured = {"samples": [asdict(one) for one in bench.samples], "idle_mib": bench.idle_mib}
            args.json.write_text(json.dumps(measured, indent=1) + "\n")
    print_report(bench.samples, bench.idle_mib)
    bad = {name: sum(one.load.bad for one in bench.samples if one.side == name) for name in bench.cast.names}
    for name, num in bad.items():
        if num:
            print(f"{name}: {num} requests were not answered in full")
    return int(bad[BACKHAUL] > 0)


if __name__ == "__main__":
    sys.exit(main())

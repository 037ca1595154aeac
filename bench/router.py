"""What the router costs: turns per second of its core, beside the least proxy that does the same two requests.

    python -m bench.router [--seconds 3] [--rounds 3] [--cases NAME,…] [--profile]

Load generator and engines are C programs without a model (`bench/native/`), so that next to nothing but router and
proxy is measured. Both run in processes of their own on one core, and take turns of `--seconds` within each round.
Their cost is the processor time they took, which a busy machine changes less than it changes the clock's:

    turns/core-s  answered turns over processor seconds: what one core that does nothing else would answer
    turns/s       the same by the clock
    ratio         of turns/core-s, Backhaul over pass-through, of the same round: the median and the extremes

The cases are first turns of chats, which have nothing to recall but leave a record (goal: a ratio of 0.6), and one of
later turns, where the router also takes the last turn's record, has the prompt tokenized, compares it and offers the
last turn's blocks: work that the pass-through cannot do, so that the ratio has no goal there.

Latency is taken at a rate that keeps everything idle most of the time; "added" is what is more than the two engines
take when they are asked directly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.native.build import BuildError
from bench.profiled import table
from bench.router_parts import Load, Parts, SideName, running_parts
from bench.router_report import SIDES, Latency, Run, print_report
from bench.stack import provenance

CONNECTIONS: Final = 32
CHUNKS: Final = 32
WARM_UP_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    what: str
    text_bytes: int
    """Of the prompt."""
    stream: bool = False
    named: bool = False
    """The client names the conversation. Otherwise a chat is found by its messages, and a completion by nothing."""
    goes_on: bool = False
    """Each connection is a conversation, of which every request is the next turn."""
    chat: bool = True

    @property
    def body(self) -> dict[str, Any]:
        text = ("All work and no play makes a dull benchmark. " * (self.text_bytes // 45 + 1))[: self.text_bytes]
        asked = f"Question ########. {text}"
        prompt = {"messages": [{"role": "user", "content": asked}]} if self.chat else {"prompt": asked}
        name = {"conversation_id": "conversation-########"} if self.named else {}
        # The mark is replaced where it stands first.
        return {"model": "stub", **name, **prompt, "max_tokens": CHUNKS, "stream": self.stream}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


CASES: Final = (
    Case("whole", "answer in one piece, small body", 60),
    Case("whole-30k", "answer in one piece, body of 30 KB", 30_000),
    Case("stream", f"stream of {CHUNKS} events, small body", 60, stream=True),
    Case("later", "later turns, body of 6 KB", 6_000, named=True, goes_on=True),
)


@dataclass
class Bench:
    parts: Parts
    seconds: float
    runs: list[Run] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    _first: int = 0

    async def warm_up(self, case: Case) -> None:
        for side in SIDES:
            await self._load(case, side, WARM_UP_SECONDS)

    async def round(self, number: int, cases: Sequence[Case]) -> None:
        """Each case on each side; who goes first changes."""
        for case in cases:
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                before = self.parts.sides[side].cpu_seconds()
                load = await self._load(case, side, self.seconds)
                spent = self.parts.sides[side].cpu_seconds() - before
                self.runs.append(Run(case.name, side, load, spent))

    async def latency(self, rate: float) -> None:
        ports: dict[str, int] = {side: self.parts.sides[side].port for side in SIDES}
        ports |= {"prefill engine": self.parts.prefill, "decode engine": self.parts.decode}
        taken: dict[bool, dict[str, Load]] = {False: {}, True: {}}
        for name, port in ports.items():
            for case in (CASES[0], CASES[2]):
                taken[case.stream][name] = await self.parts.launcher.load(
                    port, case.body, "--rate", rate, "--seconds", self.seconds, "--first", self._next()
                )
        self.latencies.append(Latency(taken[False], taken[True]))

    async def _load(self, case: Case, side: SideName, seconds: float) -> Load:
        numbers = ("--number", "connection") if case.goes_on else ("--first", self._next())
        return await self.parts.launcher.load(
            self.parts.sides[side].port, case.body, "--connections", CONNECTIONS, "--seconds", seconds, *numbers
        )

    def _next(self) -> int:
        """No request's number comes twice in a run of the benchmark."""
        self._first += 200_000
        return self._first

    @property
    def num_bad(self) -> int:
        """Requests that were not answered in full."""
        idle = [load for one in self.latencies for loads in (one.whole, one.streams) for load in loads.values()]
        return sum(load.bad for load in [*idle, *(run.load for run in self.runs)])


async def measure(args: argparse.Namespace, cases: Sequence[Case]) -> tuple[Bench, dict[str, float]]:
    """What was measured, and what the router counted meanwhile."""
    async with running_parts(chunks=CHUNKS, interval_us=args.interval_us) as parts:
        bench = Bench(parts, args.seconds)
        for case in cases:
            await bench.warm_up(case)
        for number in range(args.rounds):
            await bench.round(number, cases)
            await bench.latency(args.rate)
        return bench, await parts.counters()


async def profile(args: argparse.Namespace, case: Case) -> None:
    """One case, with both sides under a profiler."""
    with tempfile.TemporaryDirectory(prefix="backhaul-profiles-") as folder:
        async with running_parts(chunks=CHUNKS, interval_us=args.interval_us, profiles=Path(folder)) as parts:
            bench = Bench(parts, args.seconds)
            await bench.round(0, [case])
        print(f"{provenance()} · {case.what}")
        for run in bench.runs:
            print(f"\n{run.side}: " + "\n".join(table(Path(folder) / run.side, run.load.good)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="with commas between them")
    parser.add_argument("--interval-us", type=int, default=1000, help="between two events of a stream")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second for the latency")
    parser.add_argument("--profile", action="store_true", help="tell where the time goes instead, case by case")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    args = parser.parse_args()
    known = {case.name: case for case in CASES}
    if unknown := set(args.cases.split(",")) - known.keys():
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    cases = [known[name] for name in args.cases.split(",")]
    if args.profile:
        for case in cases:
            asyncio.run(profile(args, case))
        return 0
    try:
        bench, counters = asyncio.run(measure(args, cases))
    except BuildError as error:
        parser.exit(1, f"{error}\n")
    print_report({case.name: case.what for case in cases}, bench.runs, bench.latencies, counters)
    if args.json:
        measured = {
            "runs": [asdict(run) for run in bench.runs],
            "latencies": [asdict(latency) for latency in bench.latencies],
            "counters": counters,
            "bad": bench.num_bad,
        }
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    if bench.num_bad:
        print(f"{bench.num_bad} requests were not answered in full")
    return int(bench.num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())

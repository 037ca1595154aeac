"""Faults at random, from a seed: in each group of parts one at a time, so that another of its kind always lives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tests.chaos.fleet import Fleet
from tests.chaos.parts import Group, Part

BACK_SECONDS = 60.0
"""By then routers must count on a part again that serves."""
MAX_STARTS = 3
WATCH_SECONDS = 0.05
ENGINE_FAULTS = (
    "kill",
    "freeze",
    "freeze and kill",
    "restart",
    "cut",
    "slow",
    "slow and cut",
    "stall",
    "stall and cut",
)
OTHER_FAULTS = ("kill", "freeze", "restart")
FATAL = ("kill", "freeze and kill", "restart")
"""The process is another one afterwards."""


@dataclass
class Fault:
    kind: str
    part: str
    group: Group
    start: float
    end: float | None = None
    """When routers counted on the part again; None: not yet."""

    def hits(self, start: float, end: float) -> bool:
        return self.start <= end and (self.end is None or self.end >= start)


@dataclass
class Injector:
    fleet: Fleet
    seed: int
    pause: tuple[float, float] = (0.5, 3.0)
    """Seconds between two faults of a group."""
    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_runs: int = 0
    slowest: dict[str, float] = field(default_factory=dict)
    """The longest that each of these took, in seconds."""

    async def run(self, stop: asyncio.Event, *, spared: Sequence[Part] = ()) -> None:
        """Until told to stop, and what was broken by then is whole again. Spared parts survive."""
        self.num_runs += 1
        groups = {part.group for part in self.fleet.parts}
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch())
            work = [tasks.create_task(self._trouble(group, stop, spared)) for group in sorted(groups)]
            await asyncio.gather(*work)
            watch.cancel()

    def active(self, start: float, end: float) -> list[Fault]:
        return [fault for fault in self.faults if fault.hits(start, end)]

    def lived(self, start: float, end: float) -> bool:
        """Whether one prefill engine, one decode engine and one router was well at each moment of this time."""
        moments = [start, end, *(f.start for f in self.faults if start <= f.start <= end)]
        return all(self._live_at(moment) for moment in moments)

    def _live_at(self, moment: float) -> bool:
        hit = {fault.part for fault in self.active(moment, moment)}
        groups: tuple[Group, ...] = ("prefill", "decode", "router")
        return all(any(part.name not in hit for part in self.fleet.group(group)) for group in groups)

    async def _trouble(self, group: Group, stop: asyncio.Event, spared: Sequence[Part]) -> None:
        rng = random.Random(f"faults {self.seed} {group} {self.num_runs}")
        deck: list[tuple[str, Part]] = []
        while not stop.is_set():
            await _unless(stop, rng.uniform(*self.pause))
            if stop.is_set():
                return
            if not deck:
                deck = self._deck(group, spared, rng)
            kind, part = deck.pop()
            await self._inflict(kind, part, rng)

    def _deck(self, group: Group, spared: Sequence[Part], rng: random.Random) -> list[tuple[str, Part]]:
        """Every fault once, in random order, but every other one fatal as long as there are any."""
        faults = [
            (kind, part)
            for part in self.fleet.group(group)
            for kind in (OTHER_FAULTS if part.trouble is None else ENGINE_FAULTS)
            if not (part in spared and kind in FATAL)
        ]
        rng.shuffle(faults)
        fatal, mild = ([one for one in faults if (one[0] in FATAL) == is_fatal] for is_fatal in (True, False))
        pairs = zip_longest(fatal, mild)
        return [one for pair in pairs for one in pair if one is not None][::-1]

    async def _inflict(self, kind: str, part: Part, rng: random.Random) -> None:
        async with _Hold(self, kind, part):
            await getattr(self, f"_{kind.replace(' ', '_')}")(part, rng)
            await self._back(part)

    async def _back(self, part: Part) -> None:
        """Wait until the part serves and is counted on."""
        was_running = part.runs
        await self._serve(part)
        served = time.monotonic()
        while not await self.fleet.is_seen(part):
            if time.monotonic() > served + BACK_SECONDS:
                self.problems.append(f"{part.name} serves again, but routers do not count on it: {part.tail()}")
                return
            await asyncio.sleep(0.02)
        if part.trouble is not None:
            self._took("an engine that serves again: until all routers count on it", served)
        elif part.group == "router" and not was_running:
            self._took("a router: from its start until it is ready", part.spawned, served)

    def _took(self, what: str, start: float, end: float | None = None) -> None:
        seconds = (time.monotonic() if end is None else end) - start
        self.slowest[what] = max(self.slowest.get(what, 0.0), seconds)

    async def _serve(self, part: Part) -> None:
        """Start it if it does not run; again if that fails, which is reported."""
        for _ in range(MAX_STARTS):
            if not part.runs:
                part.spawn()
            try:
                return await part.serve(self.fleet.client)
            except AssertionError as error:
                self.problems.append(str(error))
        raise AssertionError(f"{part.name} cannot be started any more: {part.tail()}")

    async def _kill(self, part: Part, rng: random.Random) -> None:
        await part.kill()
        if part.trouble is not None:
            await self._until_given_up(part)
        await asyncio.sleep(rng.uniform(0, 2))

    async def _until_given_up(self, engine: Part) -> None:
        killed = time.monotonic()
        while not await self.fleet.is_given_up(engine):
            if time.monotonic() > killed + BACK_SECONDS:
                self.problems.append(f"{engine.name} was killed, and routers still count on it")
                return
            await asyncio.sleep(0.02)
        self._took("an engine that was killed: until no router counts on it", killed)

    async def _freeze(self, part: Part, rng: random.Random) -> None:
        part.freeze()
        await asyncio.sleep(rng.uniform(0.5, 5))
        part.thaw()

    async def _freeze_and_kill(self, part: Part, rng: random.Random) -> None:
        part.freeze()
        await asyncio.sleep(rng.uniform(0.5, 5))
        await part.kill()

    async def _restart(self, part: Part, rng: random.Random) -> None:
        code = await part.stop()
        if code != 0:
            self.problems.append(f"{part.name} ended with {code} after SIGTERM: {part.tail()}")

    async def _cut(self, part: Part, rng: random.Random) -> None:
        assert part.trouble is not None
        for _ in range(rng.randint(3, 8)):
            part.trouble.cut()
            await asyncio.sleep(rng.uniform(0, 0.8))

    async def _slow(self, part: Part, rng: random.Random) -> None:
        assert part.trouble is not None
        part.trouble.latency = rng.choice((0.002, 0.02, 0.1))
        await asyncio.sleep(rng.uniform(2, 6))
        part.trouble.resume()

    async def _slow_and_cut(self, part: Part, rng: random.Random) -> None:
        """Many streams are under way by then."""
        assert part.trouble is not None
        part.trouble.latency = 0.02
        await asyncio.sleep(rng.uniform(1, 4))
        part.trouble.cut()
        part.trouble.resume()

    async def _stall(self, part: Part, rng: random.Random) -> None:
        assert part.trouble is not None
        part.trouble.stall()
        await asyncio.sleep(rng.uniform(0.5, 6))
        part.trouble.resume()

    async def _stall_and_cut(self, part: Part, rng: random.Random) -> None:
        assert part.trouble is not None
        part.trouble.stall()
        await asyncio.sleep(rng.uniform(0.5, 6))
        part.trouble.cut()
        part.trouble.resume()

    async def _watch(self) -> None:
        """A part that ends by itself is started again, as whoever deploys it would do, and reported."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for part in self.fleet.parts:
                if part.meant_to_run and not part.runs:
                    assert part.process is not None
                    self.problems.append(f"{part.name} ended by itself with {part.process.returncode}: {part.tail()}")
                    await part.lost()
                    if part.name not in self.fleet.out:  # else whoever has hold of it starts it
                        async with _Hold(self, "its own", part):
                            await self._back(part)


@dataclass
class _Hold:
    """A fault from its beginning until its part is well again."""

    injector: Injector
    kind: str
    part: Part

    async def __aenter__(self) -> None:
        self._fault = Fault(self.kind, self.part.name, self.part.group, time.monotonic())
        self.injector.faults.append(self._fault)
        self.injector.fleet.out[self.part.name] = self.kind

    async def __aexit__(self, *_: object) -> None:
        self._fault.end = time.monotonic()
        self.injector.fleet.out.pop(self.part.name, None)


async def _unless(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass

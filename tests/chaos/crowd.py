"""Clients: conversations in parallel over all routers, some slow, some gone before the end, and what becomes of every
turn of theirs."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp

from tests.chaos.parts import Part
from tests.chaos.results import Failure, Results
from tests.property.client import Reply, ask
from tests.property.dialog import Dialog, make_dialog
from tests.property.fleet import MAX_MODEL_LEN
from tests.property.player import check_answer, request_of
from tests.property.reference import Mismatch, Reference
from tests.property.script import UNKNOWN_MODEL, History, Turn, history

PATIENCE = 100.0
"""Seconds until a client gives up: more than all of a router's own limits in a row."""
THINKING = (0.1, 1.0)
"""Seconds between two turns of a client."""
SMALL_WINDOW = 4096
"""Bytes of a slow client's receive buffer, so that whoever sends has to wait."""

LONG = 60
"""Tokens of a long answer: many of the answers that faults cut off are such."""
KEPT_SECONDS = 2.0
"""A client's idle connection."""

Manner = Literal["patient", "long", "slow", "leaves early", "leaves amid"]
MANNERS: tuple[Manner, ...] = ("patient",) * 5 + ("long", "long", "slow", "leaves early", "leaves amid")


@dataclass(frozen=True)
class Door:
    part: Part | None
    """The router there; None for a load balancer in front of several."""
    url: str
    client: aiohttp.ClientSession
    slow: aiohttp.ClientSession


@dataclass
class Crowd:
    doors: Sequence[Door]
    reference: Reference
    results: Results
    seed: int
    lived: Callable[[float, float], bool] = lambda start, end: True
    """Whether between these times all were there that it takes to answer."""
    why: Callable[[float, float], str] = lambda start, end: ""
    """What was wrong in the fleet meanwhile."""
    manners: Sequence[Manner] = MANNERS
    _seeds: Iterator[int] = field(default_factory=itertools.count)
    _checker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    async def run(self, num_clients: int, stop: asyncio.Event) -> None:
        """So many conversations at a time, until told to stop; turns under way are ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._talk(stop))

    async def _talk(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = next(self._seeds)
            rng = random.Random(f"client {self.seed} {number}")
            script = history(self.seed * 1_000_003 + number)
            await self._play(script, rng, stop)

    async def _play(self, script: History, rng: random.Random, stop: asyncio.Event) -> None:
        dialog = make_dialog(script, self.reference.tokenizer)
        for planned in script.turns:
            await asyncio.sleep(rng.uniform(*THINKING) + planned.pause)
            if stop.is_set():
                return
            turn = replace(planned, leave=None)
            for edit in turn.edits:
                dialog.edit(edit)
            dialog.shorten(turn)
            dialogs = [dialog] * turn.copies + ([dialog.rival(turn.rival)] if turn.rival else [])
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._ask(script, turn, each, rng)) for each in dialogs]
            if (reply := asked[0].result()) is not None:
                dialog.answered(reply)

    async def _ask(self, script: History, turn: Turn, dialog: Dialog, rng: random.Random) -> Reply | None:
        """One turn, at one router or, if that has gone, the next; its answer if it has one, which is right."""
        manner, canonical, path = rng.choice(self.manners), dialog.prompt_ids(turn), dialog.path(turn)
        if manner == "leaves amid" and turn.stream:
            turn = replace(turn, leave=rng.choice((1, 2, 4, 8)))
        if manner in ("long", "slow") and not turn.stop:
            turn = replace(turn, ignore_eos=True, max_tokens=LONG)
        turn = replace(
            turn, max_tokens=min(turn.max_tokens, MAX_MODEL_LEN - len(canonical))
        )  # rivals are not shortened
        body, headers = request_of(script, turn, dialog)
        if manner == "slow" and path == "/v1/chat/completions":
            body |= {"logprobs": True, "top_logprobs": 20}  # answers that fill buffers
        early = rng.uniform(0, 0.4) if manner == "leaves early" else PATIENCE
        self.results.tally["turns"] += 1
        for number in range(len(self.doors)):
            door = self.doors[(turn.router + number) % len(self.doors)]
            was_there = door.part is None or door.part.is_serving
            asked = _Asked(turn, door, path, early, time.monotonic(), was_there)
            await self._send(asked, body, headers, slow=manner == "slow")
            if not self._is_for_another(asked) or number == len(self.doors) - 1:
                return await self._judge(asked, canonical)
            self.results.tally["turns taken to another router"] += 1
        raise AssertionError("there is no router")

    async def _send(self, asked: _Asked, body: dict[str, Any], headers: dict[str, str], *, slow: bool) -> None:
        """Ask, and note how it ended."""
        door, turn = asked.door, asked.turn
        front = _Front(door.url, door.slow if slow else door.client)
        try:
            async with asyncio.timeout(asked.patience):
                pace = 0.05 if slow else 0.0
                await ask(front, asked.path, body, headers, leave=turn.leave, pace=pace, reply=asked.reply)
        except TimeoutError:
            asked.gave_up = True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            asked.broken = f"{type(error).__name__}: {error}"
        except AssertionError as error:
            asked.wrong = str(error)
        asked.end = time.monotonic()

    def _is_for_another(self, asked: _Asked) -> bool:
        """Whether the router itself is gone, and nothing of an answer had come."""
        said_nothing = asked.broken is not None and not asked.reply.status
        return asked.router_has_gone and (said_nothing or asked.reply.status == 503)

    async def _judge(self, asked: _Asked, canonical: list[int]) -> Reply | None:
        turn, reply, tally = asked.turn, asked.reply, self.results.tally
        if asked.wrong is not None:
            self._failed("wrong answer", asked, asked.wrong)
            return None
        if not await self._is_right_so_far(asked, canonical):
            return None
        if turn.model == UNKNOWN_MODEL and reply.status == 404:
            tally["refused as they must be"] += 1
        elif asked.has_left:
            tally["clients gone before the end"] += 1
        elif reply.status == 200 and reply.num_events > (reply.error is not None) and not reply.ended:
            self._cut(asked)
        elif reply.status != 200 or reply.error is not None or not reply.ended:
            self._no_answer(asked)
        else:
            return await self._check(asked, canonical)
        return None

    def _cut(self, asked: _Asked) -> None:
        if asked.reply.error is not None:
            self.results.tally["streams cut, with an error event"] += 1
        elif asked.router_has_gone:
            self.results.tally["streams cut by the end of a router"] += 1
        else:
            self._failed("cut without an error event", asked, asked.what)

    def _no_answer(self, asked: _Asked) -> None:
        if asked.broken is not None and asked.router_has_gone:
            self.results.tally["turns lost with their router"] += 1
        elif 400 <= asked.reply.status < 500 and asked.reply.status != 429:
            self._failed("refused", asked, asked.what)
        elif self.lived(asked.start, asked.end):
            self._failed("failed before the first byte", asked, asked.what)
        else:
            self.results.tally["turns failed while no engine or router could answer"] += 1

    async def _check(self, asked: _Asked, canonical: list[int]) -> Reply | None:
        tally, told = self.results.tally, asked.reply.explain
        try:
            kind = await self._aside(check_answer, self.reference, asked.turn, asked.reply, canonical)
        except AssertionError as error:
            self._failed("wrong answer", asked, str(error))
            return None
        tally["turns answered right"] += 1
        tally[f"prompts {kind}"] += 1
        tally["turns answered after a retry"] += int(told.get("attempts", 1)) > 1
        tally["tokens pulled for turns"] += int(told.get("tokens-pulled", 0))
        return asked.reply

    async def _is_right_so_far(self, asked: _Asked, canonical: list[int]) -> bool:
        """What there is of an answer that has no end must be the beginning of the right one."""
        reply, reference = asked.reply, self.reference
        if reply.ended or not reply.prompt_ids:
            return True
        try:
            await self._aside(reference.prompt_kind, reply.prompt_ids, canonical)
            await self._aside(reference.check_tokens, reply.prompt_ids, reply.token_ids)
            if reply.text and not reply.token_ids:  # a response tells its tokens at its end only
                await self._aside(reference.check_beginning, reply.prompt_ids, reply.text, asked.turn.max_tokens)
        except Mismatch as error:
            self._failed("wrong answer", asked, str(error))
            return False
        self.results.tally["unfinished answers right as far as they went"] += 1
        return True

    async def _aside(self, check: Callable[..., Any], *args: Any) -> Any:
        """Checks compute; clients and the network go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._checker, check, *args)

    def _failed(self, kind: str, asked: _Asked, what: str) -> None:
        where = asked.door.part.name if asked.door.part is not None else "load balancer"
        self.results.failed(
            Failure(
                kind,
                asked.start,
                asked.end - asked.start,
                f"{asked.path} at {where}, {'streamed' if asked.turn.stream else 'whole'}",
                what,
                asked.reply.headers.get("x-request-id", ""),
                self.why(asked.start, asked.end),
            )
        )


@dataclass
class _Asked:
    """One request to one router, and how it went."""

    turn: Turn
    door: Door
    path: str
    patience: float
    start: float
    was_there: bool
    """The router served when it was sent."""
    end: float = 0.0
    reply: Reply = field(default_factory=lambda: Reply(0, {}))
    gave_up: bool = False
    broken: str | None = None
    """The connection failed."""
    wrong: str | None = None
    """The answer contradicts itself."""

    @property
    def has_left(self) -> bool:
        """The client did, as it meant to."""
        enough = self.turn.leave is not None and self.reply.num_events >= self.turn.leave
        return (self.gave_up and self.patience < PATIENCE) or (enough and not self.reply.ended)

    @property
    def router_has_gone(self) -> bool:
        """At some time since it was sent, the router was not there, or not ready yet."""
        part = self.door.part
        return part is not None and (not self.was_there or not part.is_serving or part.ended_since(self.start))

    @property
    def what(self) -> str:
        told = "gave up waiting" if self.gave_up else self.broken
        return f"status {self.reply.status}, {self.reply.num_events} events, {told or self.reply.error!r}"


@dataclass(frozen=True)
class _Front:
    url: str
    client: aiohttp.ClientSession


async def open_door(stack: AsyncExitStack, url: str, part: Part | None = None) -> Door:
    def session(**settings: Any) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS, **settings)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    patient = await stack.enter_async_context(session())
    slow = await stack.enter_async_context(session(socket_factory=_narrow))
    return Door(part, url, patient, slow)


def _narrow(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW)
    return made

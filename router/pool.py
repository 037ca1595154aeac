"""The engines of all roles: who belongs to the pools, who leaves them, and who serves what."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

from router.choose import idler
from router.client import Origin
from router.discovery.source import Found
from router.faults import EngineFault
from router.member import Engine, Role
from router.roster import Roster
from router.statement import EngineStatement

LEFT_SECONDS: Final = 3600.0
"""For which one that has left is still found: no turn takes longer."""
GENERATING: Final[tuple[Role, ...]] = ("prefill", "decode")
"""Roles that have all of a model, and do not only encode media."""
MAX_REMEMBERED: Final = 1000
"""Models that no engine lists any more."""

log = logging.getLogger("router.pool")

Member = Callable[[Engine], None]


class _Place(NamedTuple):
    role: Role
    url: str


class Expected:
    """A request that an engine does not have yet."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.expected += 1

    def __exit__(self, *error: object) -> None:
        self._engine.expected -= 1


class Pool:
    """Engines join and leave at any time; whoever wants to know of it sets `on_join` and `on_leave`.

    One that has left is still found for a while: turns may be under way to it, and end as they would have.
    """

    def __init__(
        self,
        roles: Iterable[Role],
        *,
        stated: Mapping[str, EngineStatement] = MappingProxyType({}),
        limits: Mapping[Role, int | None] = MappingProxyType({}),
    ) -> None:
        """`roles` that have a pool at all, be it empty now. `stated`: by URL, or by where engines come from. `limits`:
        requests that an engine gets at a time, if another can be given what is beyond."""
        self._limits = limits
        self._roles = frozenset(roles)
        self._stated = stated
        self._members: dict[_Place, Engine] = {}
        self._named: dict[tuple[Role, str], Mapping[str, Found]] = {}
        """By whom, as last told."""
        self._drained: set[tuple[_Place, str]] = set()
        """By operators; one that goes and comes back stays so, another incarnation does not."""
        self._left: dict[_Place, tuple[Engine, float]] = {}
        self.remembered: dict[str, None] = {}
        """Models that engines served which have left; others may come."""
        self.observed_until = 0.0
        """Somebody wants to know how busy engines are, be there a choice between them or not; event loop time."""
        self.draw = random.Random()
        self._num_dispatched = 0
        self.prefill: tuple[Engine, ...] = ()
        self.decode: tuple[Engine, ...] = ()
        self.encode: tuple[Engine, ...] = ()
        self.rosters: Mapping[Role, Roster[Engine]] = {role: Roster() for role in get_args(Role)}
        """The same, as plans look them up."""
        self._behind: dict[Origin, list[Engine]] = {}
        self.on_join: list[Member] = []
        self.on_leave: list[Member] = []
        self.on_change: list[Callable[[], None]] = []
        """Of the state of any engine."""
        self._waiting: set[asyncio.Future[None]] = set()

    # Who belongs to it.

    def update(self, role: Role, source: str, found: Sequence[Found]) -> None:
        """Who there is of this role, according to this source. An engine that several name belongs to the first."""
        named = self._named[role, source] = {one.url: one for one in found}
        for engine in [one for one in self.of(role) if one.source == source]:
            one = named.get(engine.url)
            if one is None or (one.incarnation and engine.incarnation and one.incarnation != engine.incarnation):
                self._leave(engine)
        for (of_role, name), theirs in list(self._named.items()):
            if of_role == role:
                self._take_in(role, name, theirs)

    def _take_in(self, role: Role, source: str, named: Mapping[str, Found]) -> None:
        for one in named.values():
            engine = self._members.get(_Place(role, one.url)) or self._join(role, source, one)
            if engine is None or engine.source != source:
                continue
            engine.incarnation = engine.incarnation or one.incarnation
            if one.leaving:
                engine.drained_by.add("source")
            else:
                engine.drained_by.discard("source")
            engine.tell("its source says so")

    def drain(self, url: str, role: Role | None, *, on: bool) -> list[Engine]:
        """An operator has an engine drained, or takes that back. Returns which it is, in each of its roles."""
        engines = [one for one in self.engines if url in (one.url, one.name) and role in (None, one.role)]
        for engine in engines:
            self.drain_one(engine.role, engine.url, engine.incarnation, on=on)
        return engines

    def drain_one(self, role: Role, url: str, incarnation: str, *, on: bool) -> Engine | None:
        """The same for one that need not be known yet."""
        known = place, _ = _Place(role, url), incarnation
        (self._drained.add if on else self._drained.discard)(known)
        engine = self._members.get(place)
        if engine is None or engine.incarnation != incarnation:
            return None
        (engine.drained_by.add if on else engine.drained_by.discard)("operator")
        engine.tell("an operator says so")
        return engine

    def _join(self, role: Role, source: str, found: Found) -> Engine | None:
        stated = self._stated.get(found.url) or self._stated.get(source)
        try:
            engine = Engine(
                found.url,
                role,
                stated,
                source=source,
                incarnation=found.incarnation,
                on_change=self._changed,
                on_news=self._has_news,
            )
        except ValueError as error:
            log.warning("no engine", extra={"source": source, "why": str(error)})
            return None
        engine.limit = self._limits.get(role)
        if (_Place(role, found.url), found.incarnation) in self._drained:
            engine.drained_by.add("operator")
        place = _Place(role, found.url)
        self._members[place] = engine
        self._left.pop(place, None)
        self.rosters[role].put(engine)
        self._behind.setdefault(engine.origin, []).append(engine)
        self._list()
        log.info("engine joins", extra={"engine": engine.name, "role": role, "source": source})
        for told in self.on_join:
            told(engine)
        return engine

    def _leave(self, engine: Engine) -> None:
        place = _Place(engine.role, engine.url)
        del self._members[place]
        self.rosters[engine.role].remove(engine.url)
        self._behind[engine.origin].remove(engine)
        if not self._behind[engine.origin]:
            del self._behind[engine.origin]
        now = time.monotonic()
        self._left = {
            at: (one, since) for at, (one, since) in self._left.items() if one.in_flight or since > now - LEFT_SECONDS
        }
        self._left[place] = engine, now
        self.remembered.update(dict.fromkeys(engine.models))
        while len(self.remembered) > MAX_REMEMBERED:
            del self.remembered[next(iter(self.remembered))]
        engine.is_gone = True
        engine.tell("no longer there")
        self._list()
        for told in self.on_leave:
            told(engine)

    def _has_news(self, engine: Engine) -> None:
        if self._members.get(_Place(engine.role, engine.url)) is engine:
            self.rosters[engine.role].put(engine)

    def _changed(self) -> None:
        for told in self.on_change:
            told()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def change(self) -> None:
        """Wait until the state of any engine is another."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def _list(self) -> None:
        self.prefill, self.decode, self.encode = (
            tuple(one for one in self._members.values() if one.role == role) for role in ("prefill", "decode", "encode")
        )

    # Who is there.

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.prefill + self.decode + self.encode

    @property
    def generating(self) -> tuple[Engine, ...]:
        """Those that have all of a model, and not only what encodes media."""
        return self.prefill + self.decode

    def of(self, role: Role) -> tuple[Engine, ...]:
        return {"prefill": self.prefill, "decode": self.decode, "encode": self.encode}[role]

    def has(self, role: Role) -> bool:
        """Whether there is a pool of this role, be it empty now."""
        return role in self._roles

    def is_up(self, role: Role) -> bool:
        """Whether an engine of this role is ready."""
        return any(engine.ready for engine in self.of(role))

    def get(self, role: Role, url: str) -> Engine:
        """Also one that has left meanwhile."""
        place = _Place(role, url)
        return self._members.get(place) or self._left[place][0]

    def expecting(self, engine: Engine) -> Expected:
        """For the time until a request that is meant for it can be sent: others should know."""
        self._num_dispatched += 1
        engine.last = self._num_dispatched
        return Expected(engine)

    def dispatch(self, engine: Engine) -> None:
        """It gets a request."""
        self._num_dispatched += 1
        engine.last = self._num_dispatched
        engine.dispatched += 1
        engine.in_flight += 1

    def one_ready(self, model: str, *, rather: Sequence[str | None]) -> Engine | None:
        """An engine to ask for the ids of a prompt: one of `rather` and one that prefills, if there is such."""
        pools = [self.rosters[role].able(model) for role in GENERATING]
        own = [one for able in pools for url in rather if url is not None and (one := able.find(url)) is not None]
        others = (idler(able, self.draw) for able in pools if able)
        for one in chain(own, others):
            if not one.spared and one.can.tokenize is not False:
                return one
        able = [one for pool in pools for one in pool if one.can.tokenize is not False]
        return min(able, key=lambda one: (one.spared, one.url not in rather, one.load), default=None)

    def block_size(self, url: str) -> int | None:
        """Of the decode engine there, if it is known."""
        engine = self._members.get(_Place("decode", url))
        return None if engine is None else engine.can.block_size

    # What they serve.

    def decodes_ours(self, model: str) -> bool:
        """Whether all engines that may decode for this model are Backhaul's."""
        able = [engine for engine in self.decode if model in engine.models]
        return bool(able) and all(engine.is_ours(model) for engine in able)

    def models(self) -> dict[str, Mapping[str, Any]]:
        """The models that can be decoded, with the smallest `max_model_len` any engine has for them."""
        cards: dict[str, Mapping[str, Any]] = {}
        for engine in self.decode:
            for name, card in engine.models.items():
                cards.setdefault(name, card)
        return {name: {**card, **self._shortest(name)} for name, card in cards.items()}

    def _shortest(self, model: str) -> dict[str, int]:
        lengths = [engine.models[model].get("max_model_len") for engine in self.generating if model in engine.models]
        known = [length for length in lengths if isinstance(length, int)]
        return {"max_model_len": min(known)} if known else {}

    # How they are.

    def blame(self, fault: EngineFault) -> None:
        """It has failed a turn. Not more than half of a pool are ejected for that: then it is not them."""
        if fault.kind == "unreachable" or fault.status == 503:
            return  # which it is not to be blamed for
        engine = fault.engine
        others = [one for one in self.of(engine.role) if one is not engine]
        num_well = sum(one.health in ("ready", "suspect") and one.ready for one in others)
        engine.faulted(fault.kind, may_eject=2 * num_well > len(others))

    def doubt(self, origin: Origin) -> None:
        """Who is there has closed a connection that could have been used again: it may have ended."""
        for engine in self._behind.get(origin, ()):
            engine.doubt.set()

"""The engines of one role, kept so that a plan need not look at all of them.

Engines that list the same models and exchange KV with the same others are a group. Groups follow every change of an
engine, which are rare; what changes with every request (load, who is spared) is asked of the few that a turn looks at.
However many engines there are, groups are few: one for each version of what serves a set of models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from router.capabilities import Capabilities, Traits, traits
from router.ring import Ring

FEW: Final = 8
"""Engines of which all are looked at."""
MAX_DRAWS: Final = 32
"""For two that may be chosen, before all are looked at after all."""
MAX_STEPS: Final = 128
"""On the circle, to one that may be chosen."""


class Candidate(Protocol):
    """An engine as a plan sees it."""

    @property
    def url(self) -> str: ...
    @property
    def in_rotation(self) -> bool:
        """Whether it may be given turns, one at a time perhaps."""

    @property
    def ready(self) -> bool:
        """Whether it may be given a turn now."""

    @property
    def spared(self) -> bool:
        """Whether it is given one only if no other can be."""

    @property
    def readable(self) -> bool:
        """Whether others may read its blocks."""

    @property
    def models(self) -> Collection[str]:
        """Those it listed last, also if it is down now."""

    @property
    def load(self) -> float:
        """Requests it is working on, and what else keeps it busy."""

    @property
    def last(self) -> int:
        """Grows each time it is given a request; evens out who gets the next one when all are idle."""

    @property
    def can(self) -> Capabilities: ...
    @property
    def pulls(self) -> bool:
        """Whether it may be given blocks to pull."""

    def has(self, engine_id: str | None) -> bool:
        """Whether blocks under this id may still be its own."""


C = TypeVar("C", bound=Candidate)


class _Key(NamedTuple):
    """What engines of a group have in common."""

    models: frozenset[str]
    traits: Traits


class Place(NamedTuple, Generic[C]):
    """Where an engine is."""

    engine: C
    group: Group[C]
    in_rotation: bool


class Group(Generic[C]):
    def __init__(self, key: _Key, can: Capabilities, ring: Ring[Place[C]]) -> None:
        self.key = key
        self.can = can
        """As far as `traits` go, what each of them can do."""
        self.num_engines = 0
        """Those included that are not in rotation."""
        self.rotation: list[C] = []
        self.ring = ring
        """Of all that list the same models and are in rotation."""


class Roster(Generic[C]):
    def __init__(self, engines: Iterable[C] = ()) -> None:
        self._places: dict[str, Place[C]] = {}
        self._groups: dict[_Key, Group[C]] = {}
        self._listing: dict[str, list[Group[C]]] = {}
        """By model."""
        for engine in engines:
            self.put(engine)

    def put(self, engine: C) -> None:
        """It is new, or may have become another."""
        key = _Key(frozenset(engine.models), traits(engine.can))
        place = self._places.get(engine.url)
        if place is not None:
            if place.engine is engine and place.in_rotation == engine.in_rotation and place.group.key == key:
                return
            self.remove(engine.url)
        group = self._groups.get(key) or self._open(key, engine.can)
        group.num_engines += 1
        place = self._places[engine.url] = Place(engine, group, engine.in_rotation)
        if place.in_rotation:
            group.rotation.append(engine)
            group.ring.add(engine.url, place)

    def remove(self, url: str) -> None:
        engine, group, in_rotation = self._places.pop(url)
        group.num_engines -= 1
        if in_rotation:
            group.rotation.remove(engine)
            group.ring.remove(url)
        if not group.num_engines:
            del self._groups[group.key]
            for model in group.key.models:
                self._listing[model].remove(group)
                if not self._listing[model]:
                    del self._listing[model]

    def _open(self, key: _Key, can: Capabilities) -> Group[C]:
        kin = [group for group in self._groups.values() if group.key.models == key.models]
        group = self._groups[key] = Group(key, can, kin[0].ring if kin else Ring())
        for model in key.models:
            self._listing.setdefault(model, []).append(group)
        return group

    def lists(self, model: str) -> bool:
        """Whether any engine does, also one that is down."""
        return model in self._listing

    @property
    def lists_any(self) -> bool:
        return bool(self._listing)

    def find(self, url: str | None) -> C | None:
        place = self._places.get(url) if url is not None else None
        return None if place is None else place.engine

    def place(self, url: str) -> Place[C] | None:
        return self._places.get(url)

    def listing(self, model: str) -> Sequence[Group[C]]:
        """Those included of which nobody is in rotation."""
        return self._listing.get(model, ())

    def able(self, model: str, avoid: Set[str] = frozenset()) -> Able[C]:
        """Who may be given a turn of this model."""
        return Able(self, self.listing(model), avoid)


class Able(Generic[C]):
    """Those of some groups that may be given a turn now, but for those that just failed it."""

    def __init__(self, roster: Roster[C], groups: Sequence[Group[C]], avoid: Set[str]) -> None:
        self._roster = roster
        self._groups = groups
        self._avoid = avoid

    def __bool__(self) -> bool:
        for group in self._groups:
            for engine in group.rotation:
                if self._takes(engine):
                    return True
        return False

    def __iter__(self) -> Iterator[C]:
        for group in self._groups:
            yield from filter(self._takes, group.rotation)

    def that(self, fits: Callable[[Capabilities], bool]) -> Able[C]:
        """Of the groups that do."""
        return Able(self._roster, [group for group in self._groups if fits(group.can)], self._avoid)

    def kinds(self) -> Iterator[Capabilities]:
        """What they can do, as far as `traits` go, each once."""
        return (group.can for group in self._groups if any(map(self._takes, group.rotation)))

    def find(self, url: str) -> C | None:
        place = self._roster.place(url)
        if place is None or place.group not in self._groups or not self._takes(place.engine):
            return None
        return place.engine

    def two(self, draw: random.Random) -> list[C]:
        """Drawn at random from those that are not spared, or from all if all of them are; one if there is one."""
        num_there = sum([len(group.rotation) for group in self._groups])
        if num_there > FEW and (drawn := self._two_of_many(num_there, draw)):
            return drawn
        everyone = list(self)
        well = [one for one in everyone if not one.spared] or everyone
        return well if len(well) <= 2 else draw.sample(well, 2)

    def _two_of_many(self, num_there: int, draw: random.Random) -> list[C]:
        """Empty if they are hard to find."""
        first: C | None = None
        for _ in range(MAX_DRAWS):
            one = self._at(int(draw.random() * num_there))
            if one is first or one.spared or not self._takes(one):
                continue
            if first is not None:
                return [first, one]
            first = one
        return []

    def around(self, digest: bytes) -> Iterator[C]:
        """Those that follow on the circle, the nearest first, be it several times."""
        start = int.from_bytes(digest[:8])
        around = [ring.after(start) for ring in {group.ring for group in self._groups}]
        circle = merge(*around, key=itemgetter(0)) if len(around) > 1 else around[0]
        for _, (engine, group, _) in islice(circle, MAX_STEPS):
            if group in self._groups and self._takes(engine):
                yield engine

    def _at(self, number: int) -> C:
        for group in self._groups:
            if number < (size := len(group.rotation)):
                return group.rotation[number]
            number -= size
        raise IndexError(number)

    def _takes(self, engine: C) -> bool:
        return engine.ready and engine.url not in self._avoid

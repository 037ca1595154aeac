"""One engine in one role, as long as it belongs to a pool: how it is, what work it has, and whether it gets more.

    joining ──► ready ◄──► suspect ──► ejected ──► probing ──► ready
                  └──► draining ──► gone

joining   has not been heard from
ready     lists its models and answers turns
suspect   missed a look, failed a turn, or says that it has too much to do: gets turns only if no other can
ejected   cannot be reached, or failed turn after turn
probing   answers looks again after it was ejected for what it did to turns: gets one turn at a time until one succeeds
draining  gets no new turns; what it has goes on, and its blocks may still be read
gone      no longer named by where engines come from
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from router.capabilities import OURS, Capabilities
from router.client import Response, origin_of
from router.known import Known
from router.load import Load
from router.names import listed
from router.statement import EngineStatement, without_user

Role = Literal["prefill", "decode", "encode"]
Health = Literal["joining", "ready", "suspect", "ejected", "probing"]
State = Literal["joining", "ready", "suspect", "ejected", "probing", "draining", "gone"]
Drainer = Literal["operator", "source", "itself"]

STATES: Final[tuple[State, ...]] = ("joining", "ready", "suspect", "ejected", "probing", "draining", "gone")
LOOKS_MISSED_UNTIL_EJECTED: Final = 3  # a busy engine may miss one; one that refuses connections is out at once
FAULTS_UNTIL_EJECTED: Final = 5  # turns in a row
LOOKS_UNTIL_TRUSTED: Final = 2  # of a probing engine that no turn has come to
EJECTED_SECONDS: Final = 2.0
"""For which an engine is left alone that failed turns, and twice as long each time it does so again."""
MAX_EJECTED_SECONDS: Final = 30.0
SUSPECT_SECONDS: Final = 5.0
"""After which what it did to turns is forgotten, if its looks are good and no turn has come to it."""
MAX_BUSY_SECONDS: Final = 5.0
"""For which an engine is spared that says it has too much to do; it may ask for less."""

log = logging.getLogger("router.pool")


class Engine:
    def __init__(
        self,
        url: str,
        role: Role,
        stated: EngineStatement | None = None,
        *,
        source: str = "",
        incarnation: str = "",
        on_change: Callable[[], None] = lambda: None,
        on_news: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        """`on_change` is called whenever its state has become another; `on_news` before that, and when it may list
        other models or be able to do something else."""
        stated = stated or EngineStatement()
        self.url = url
        self.name = without_user(url)
        """For whoever is told of it: what the URL says of a user is not in it."""
        self.origin = origin_of(url)
        self.role = role
        self.source = source
        self.incarnation = incarnation
        self.known = Known(self.name, role, stated.capabilities(), on_change=self._has_news)
        self.headers = stated.headers()
        """For questions of our own."""
        self.health: Health = "joining"
        self.drained_by: set[Drainer] = set()
        self.is_gone = False
        self.models: Mapping[str, Mapping[str, Any]] = {}
        """Model cards by name, as last listed."""
        self.in_flight = 0
        self.expected = 0
        """Requests that are meant for it, and not sent yet."""
        self.limit: int | None = None
        """Requests at a time, if there is another to get what is beyond."""
        self.dispatched = 0
        self.last = 0
        """When it last got a request, in requests of the whole pool."""
        self.reported = Load()
        self.process = b""
        """What tells the process that serves from an earlier or later one there, if it says."""
        self.process_seen_at = -math.inf
        """Event loop time: when it was last seen to be that one."""
        self.legs: set[Response] = set()
        """Answers under way."""
        self.doubt = asyncio.Event()
        """Set to have the engine looked at before the next look is due."""
        self.looks_missed = 0
        self.missing_since = 0.0
        """Event loop time, like the next two: when the first of those looks began."""
        self.busy_until = 0.0
        self.ejected_until = 0.0
        self.lost_at = -math.inf
        """When it last went out of rotation without having been asked to."""
        self._num_faults = 0
        self._faulted_at = 0.0
        self._num_ejections = 0
        self._looks_answered = 0
        self.since = time.time()
        """Wall clock: when it came into its state."""
        self.why = ""
        self._told: State = "joining"
        self._on_change = on_change
        self._on_news = on_news
        self._time = asyncio.get_running_loop().time

    # What a plan asks.

    @property
    def state(self) -> State:
        if self.is_gone:
            return "gone"
        if self.drained_by and self.health != "ejected":
            return "draining"
        return self.health

    @property
    def in_rotation(self) -> bool:
        """Whether it may be given turns, one at a time perhaps."""
        return self.readable and not self.drained_by and not self.is_gone

    @property
    def ready(self) -> bool:
        """Whether it may be given a turn now."""
        if self.drained_by or self.is_gone:
            return False
        health = self.health
        return health == "ready" or health == "suspect" or (health == "probing" and self.in_flight + self.expected == 0)

    @property
    def spared(self) -> bool:
        """Whether it is given one only if no other can be."""
        is_full = self.limit is not None and self.in_flight + self.expected >= self.limit
        return is_full or self.health == "suspect" or (self.busy_until > 0 and self.busy_until > self._time())

    @property
    def readable(self) -> bool:
        """Whether others may read its blocks."""
        return self.health in ("ready", "suspect", "probing")

    @property
    def load(self) -> float:
        """Requests it works on, ours and as far as it tells others', and what a full cache is worth."""
        return self.in_flight + self.expected + self.reported.beside

    @property
    def can(self) -> Capabilities:
        return self.known.now

    @property
    def pulls(self) -> bool:
        return self.known.pulls

    def has(self, engine_id: str | None) -> bool:
        """Whether blocks under this id may still be its own; not if it was started anew since."""
        return engine_id is None or not self.known.is_named or self.known.goes_by(engine_id)

    def is_ours(self, model: str) -> bool:
        """Whether it is a Backhaul engine, which understands more than the engines of others."""
        stated = self.known.stated.kind
        return stated == OURS if stated else self.models.get(model, {}).get("owned_by") == OURS

    # What looks find.

    def heard(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """It has listed its models."""
        self.models = models
        self.looks_missed = 0
        if self._faulted_at < self._time() - SUSPECT_SECONDS:
            self._num_faults = 0
        self.drained_by.discard("itself")
        why = f"lists {listed(models)}"
        if self.health == "joining" or (self.health == "suspect" and self._num_faults <= 1):
            self.turn_to("ready", why)  # what turns have found only turns can prove wrong
        elif self.health == "ejected":
            if not self.ejected_until:
                self.turn_to("ready", why)
            elif self.ejected_until <= self._time():
                self._looks_answered = 0
                self.turn_to("probing", why)
        elif self.health == "probing":
            self._looks_answered += 1
            if self._looks_answered >= LOOKS_UNTIL_TRUSTED and self.in_flight == 0:
                self.turn_to("ready", why)
        self.tell("heard from")

    def missed(self, why: str, since: float) -> None:
        """It did not answer a look, which began at `since`."""
        if not self.looks_missed:
            self.missing_since = since
        self.looks_missed += 1
        if self.health == "ready":
            self.turn_to("suspect", why)
        if self.health in ("suspect", "probing") and self.looks_missed >= LOOKS_MISSED_UNTIL_EJECTED:
            self.turn_to("ejected", why)
        if self.looks_missed >= LOOKS_MISSED_UNTIL_EJECTED:
            self.let_down()

    def leaves(self) -> None:
        """It says that it is about to stop."""
        self.drained_by.add("itself")
        self.tell("it is shutting down")

    def lost(self, why: str) -> None:
        """It cannot be reached: whoever comes back is as good as new."""
        self.ejected_until = 0.0
        self._num_faults = self._num_ejections = 0
        self.turn_to("ejected", why)
        self.doubt.set()

    def let_down(self) -> None:
        """It does not answer at all: end what waits for it, but for answers that have come on meanwhile."""
        for response in self.legs:
            if response.heard_at <= self.missing_since or not response.has_begun:
                response.give_up()

    # What turns find.

    def answered(self) -> None:
        """A turn got what it had asked for."""
        self._num_faults = self._num_ejections = 0
        if self.health == "probing" or (self.health == "suspect" and not self.looks_missed):
            self.turn_to("ready", "answered a turn")

    def faulted(self, why: str, *, may_eject: bool) -> None:
        """A turn failed at it. `may_eject`: others would be left."""
        self._num_faults += 1
        self._faulted_at = self._time()
        if self.health == "probing" or (self._num_faults >= FAULTS_UNTIL_EJECTED and may_eject):
            self.eject(why)
        elif self.health == "ready" and self._num_faults > 1:
            self.turn_to("suspect", why)
        self.doubt.set()

    def eject(self, why: str) -> None:
        seconds = min(EJECTED_SECONDS * 2**self._num_ejections, MAX_EJECTED_SECONDS)
        self.ejected_until = self._time() + seconds
        self._num_ejections = min(self._num_ejections + 1, 10)
        self._num_faults = 0
        self.turn_to("ejected", why)

    def hurry(self) -> None:
        """Nobody else is left: if it answers the next look it is tried, whatever it was ejected for."""
        if self.health == "ejected":
            self.ejected_until = min(self.ejected_until, self._time())
            self.doubt.set()

    def spare(self, seconds: float) -> None:
        """It says that it has too much to do."""
        self.busy_until = self._time() + min(seconds, MAX_BUSY_SECONDS)

    def turn_to(self, health: Health, why: str) -> None:
        if health == "ejected" and self.health != "ejected":
            self.lost_at = self._time()
        self.health = health
        self.tell(why)

    def tell(self, why: str) -> None:
        """Log what it has become, if that is another state."""
        self._has_news()
        state = self.state
        if state != self._told:
            level = logging.WARNING if state in ("ejected", "suspect") else logging.INFO
            log.log(level, "engine", extra={"engine": self.name, "role": self.role, "state": state, "why": why})
            self._told, self.why, self.since = state, why, time.time()
            self._on_change()

    def _has_news(self) -> None:
        self._on_news(self)

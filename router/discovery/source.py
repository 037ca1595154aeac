"""What a source of engines is, and what all of them share."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal, Protocol

Scheme = Literal["http", "https"]

FIRST_PAUSE_SECONDS: Final = 0.1
MAX_WHY: Final = 300  # characters of what others say that go into a log line

log = logging.getLogger("router.discovery")


@dataclass(frozen=True, slots=True)
class Found:
    """One engine that a source names."""

    url: str
    """Normalized as in the settings: http://10.1.2.3:8000."""
    incarnation: str = ""
    """The uid of its pod, or "" where the source knows none: another one at the same address is another engine."""
    leaving: bool = False
    """It is still there, but takes nothing new."""


Tell = Callable[[Sequence[Found]], None]


class Source(Protocol):
    @property
    def name(self) -> str:
        """What the operator wrote."""

    async def follow(self, tell: Tell) -> None:
        """Tell the whole list, at first and at every change, until cancelled. Raises nothing for what the network does:
        while the source cannot be asked, the last list stands."""


def address_url(scheme: Scheme, address: object, port: int) -> str | None:
    """The URL of an engine there, or None if that is no IP address, or no port."""
    if isinstance(port, bool) or not 0 < port < 1 << 16:
        return None
    try:
        ip = ip_address(address if isinstance(address, str) else "")
    except ValueError:
        return None
    return f"{scheme}://[{ip}]:{port}" if ip.version == 6 else f"{scheme}://{ip}:{port}"


def one_each(found: Iterable[Found]) -> tuple[Found, ...]:
    """One engine per address and one per incarnation, in the order of their addresses.

    The successor of a leaving engine may already have its address, and then is the one that is meant. A pod of two
    address families is one engine all the same: the one at its IPv4 address.
    """
    by_url: dict[str, Found] = {}
    for one in sorted(found, key=lambda one: (one.leaving, one.incarnation)):
        by_url.setdefault(one.url, one)
    engines: dict[str, Found] = {}
    for url in sorted(by_url, key=lambda url: ("[" in url, url)):
        engines.setdefault(by_url[url].incarnation or url, by_url[url])
    return tuple(engines.values())


class Changes:
    """Tells a list at first, and then when it is another."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told: tuple[Found, ...] | None = None

    def tell(self, found: tuple[Found, ...]) -> None:
        if found != self._told:
            self._told = found
            self._tell(found)


class Problems:
    """Logs each kind of problem once, until it is over."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._kinds: set[str] = set()

    def note(self, kind: str, why: str) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            why = "".join(character if character.isprintable() else " " for character in why[:MAX_WHY])
            log.warning("discovery", extra={"source": self._source, "state": "failing", "why": why or kind})

    def over(self) -> None:
        if self._kinds:
            self._kinds.clear()
            log.info("discovery", extra={"source": self._source, "state": "works"})


class Pause:
    """Seconds until the next try: twice as long each time, and never the same for all routers."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._next = FIRST_PAUSE_SECONDS

    def take(self) -> float:
        seconds = min(self._next, self._longest)
        self._next = 2 * seconds
        return seconds * random.uniform(0.5, 1)

    def reset(self) -> None:
        self._next = FIRST_PAUSE_SECONDS

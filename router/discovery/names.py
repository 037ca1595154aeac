"""Engines as the addresses of a DNS name, or as the targets of its SRV records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.message import QueryMessage
from dns.name import root as ROOT
from dns.rdatatype import RdataType
from dns.rdtypes.IN.A import A
from dns.rdtypes.IN.AAAA import AAAA
from dns.rdtypes.IN.SRV import SRV
from dns.resolver import NXDOMAIN, Answer

from router.discovery.source import Changes, Found, Problems, Scheme, Tell, address_url, one_each

LEAST_TTL: Final = 1.0
TRY_SECONDS: Final = 1.5
ANSWER_SECONDS: Final = 4.0  # with all tries
MAX_AT_ONCE: Final = 16
UDP_BYTES: Final = 1232  # what passes everywhere without being cut into pieces; longer answers come over TCP

Kind = Literal["A", "AAAA", "SRV"]
_ADDRESSES: Final[tuple[Kind, ...]] = ("A", "AAAA")


@dataclass(frozen=True, slots=True)
class Server:
    """A DNS server in place of those in /etc/resolv.conf."""

    address: str
    port: int = 53


@dataclass(frozen=True, slots=True)
class Records:
    """The answer to one question."""

    addresses: tuple[str, ...] = ()
    targets: tuple[tuple[str, int], ...] = ()
    beside: tuple[tuple[str, str], ...] = ()
    """Names and addresses of targets, told along with them."""


class Names:
    """Questions to DNS, asked again and again. What cannot be asked now is as it was when last answered."""

    def __init__(self, server: Server | None, problems: Problems) -> None:
        self._server = server
        self._problems = problems
        self._last: dict[tuple[str, Kind], Records] = {}
        self._asked: set[tuple[str, Kind]] = set()
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self.ttl: float | None = None
        """Seconds until the first of the answers since `begin` is out of date; None if none says."""
        self.is_complete = True
        """Whether each question since then has an answer, of now or of before."""
        self._failed = False

    def begin(self) -> None:
        self._last = {question: self._last[question] for question in self._asked if question in self._last}
        self._asked.clear()
        self.ttl, self.is_complete = None, True
        self._failed = False

    def end(self) -> None:
        if not self._failed:
            self._problems.over()

    async def addresses(self, name: str) -> list[str]:
        answers = await asyncio.gather(*(self.ask(name, kind) for kind in _ADDRESSES))
        return [address for answer in answers for address in answer.addresses]

    async def ask(self, name: str, kind: Kind) -> Records:
        """None at all, if there is no such name."""
        self._asked.add((name, kind))
        try:
            async with self._at_once:
                # A new one each time, since /etc/resolv.conf may be a new one.
                answer = await _resolver(self._server).resolve(name, kind, raise_on_no_answer=False, search=True)
        except NXDOMAIN:
            records = Records()
        except (DNSException, OSError) as error:
            self._failed = True
            self._problems.note(type(error).__name__, f"{kind} of {name}: {error}")
            self.is_complete &= (name, kind) in self._last
            return self._last.get((name, kind), Records())
        else:
            records = _records(answer)
            ttl = float(answer.chaining_result.minimum_ttl)
            self.ttl = ttl if self.ttl is None else min(ttl, self.ttl)
        self._last[name, kind] = records
        return records


class NameSource:
    """One engine per address of a name, or per address of each target of its SRV records."""

    def __init__(
        self, name: str, host: str, port: int | None, *, scheme: Scheme, interval: float, server: Server | None
    ):
        """`port`: None to ask for SRV records, which tell ports."""
        self.name = name
        self._host = host
        self._port = port
        self._scheme = scheme
        self._interval = interval
        self._server = server

    async def follow(self, tell: Tell) -> None:
        changes, names = Changes(tell), Names(self._server, Problems(self.name))
        while True:
            names.begin()
            found = await self._addresses(names) if self._port else await self._targets(names)
            names.end()
            if found or names.is_complete:  # nothing, because nobody could be asked, is not an empty list
                changes.tell(found)
            await asyncio.sleep(kept_seconds(names.ttl, self._interval) * random.uniform(0.9, 1))

    async def _addresses(self, names: Names) -> tuple[Found, ...]:
        assert self._port is not None
        return self._engines((address, self._port) for address in await names.addresses(self._host))

    async def _targets(self, names: Names) -> tuple[Found, ...]:
        """All of them: what priorities and weights are meant for, the router decides by load."""
        answer = await names.ask(self._host, "SRV")
        beside: dict[str, list[str]] = {}
        for name, address in answer.beside:
            beside.setdefault(name, []).append(address)
        hosts = list(dict.fromkeys(host for host, _ in answer.targets))
        asked = [host for host in hosts if host not in beside]
        beside |= zip(asked, await asyncio.gather(*(names.addresses(host) for host in asked)), strict=True)
        return self._engines((address, port) for host, port in answer.targets for address in beside[host])

    def _engines(self, places: Iterable[tuple[str, int]]) -> tuple[Found, ...]:
        urls = (address_url(self._scheme, address, port) for address, port in places)
        return one_each(Found(url) for url in urls if url)


def kept_seconds(ttl: float | None, interval: float) -> float:
    """How long answers that are good for `ttl` are used."""
    return interval if ttl is None else min(max(ttl, LEAST_TTL), interval)


def _resolver(server: Server | None) -> Resolver:
    """Raises DNSException if there is no configuration."""
    resolver = Resolver(configure=server is None)
    if server is not None:
        resolver.nameservers = [server.address]
        resolver.port = server.port
        resolver.domain = ROOT  # else that of this host is searched
    resolver.timeout = TRY_SECONDS
    resolver.lifetime = ANSWER_SECONDS
    resolver.use_edns(0, 0, UDP_BYTES)
    return resolver


def _records(answer: Answer) -> Records:
    found: Sequence[object] = list(answer.rrset or ())
    targets = tuple(
        (one.target.to_text(), one.port)
        for one in found
        if isinstance(one, SRV) and one.target != ROOT and one.port  # the root: there is decidedly none
    )
    return Records(_texts(found), targets, _beside(answer.response) if targets else ())


def _beside(response: QueryMessage) -> tuple[tuple[str, str], ...]:
    sets = [one for one in response.additional if one.rdtype in (RdataType.A, RdataType.AAAA)]
    return tuple((one.name.to_text(), address) for one in sets for address in _texts(list(one)))


def _texts(records: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(one.address) for one in records if isinstance(one, A | AAAA))

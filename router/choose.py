"""Which of several engines: the one that knows the most of a prompt, unless it has too much to do.

Without anything known it is the less busy of two drawn at random, which keeps several routers from all choosing the
same one on figures that are a moment old (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
Prompts that begin alike go to the same engines by rendezvous hashing (Thaler and Ravishankar, "Using Name-Based
Mappings to Increase Hit Rates", 1998): when an engine comes or goes, only what it gets or had is moved.
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from router.capabilities import Capabilities


class Candidate(Protocol):
    """An engine as a plan sees it."""

    @property
    def url(self) -> str: ...
    @property
    def ready(self) -> bool:
        """Whether it may be given a turn."""

    @property
    def spared(self) -> bool:
        """Whether it is given one only if no other can be."""

    @property
    def readable(self) -> bool:
        """Whether others may read its blocks."""

    @property
    def models(self) -> Container[str]:
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


def choose(able: Sequence[C], last: str | None, slack: float, *, prefix: bytes | None, draw: random.Random) -> C:
    """One of `able`, which are one or more: the conversation's last one, else one by how the prompt begins, else the
    less busy. Nobody gets a turn for what it knows while it has `slack` more to do than another. `prefix` is a digest.
    """
    well = [one for one in able if not one.spared] or able
    if len(well) == 1:
        return well[0]
    idle = idler(well, draw)
    most = idle.load + slack
    if last is not None:
        own = next((one for one in well if one.url == last), None)
        if own is not None and own.load <= most:
            return own
    elif prefix is not None:
        return by_hash([one for one in well if one.load <= most], prefix)
    return idle


def by_hash(able: Sequence[C], digest: bytes) -> C:
    """Always the same one for the same digest, as long as it is among them."""
    return max(able, key=lambda one: blake2b(one.url.encode(), key=digest, digest_size=8).digest())


def idler(able: Sequence[C], draw: random.Random) -> C:
    """The less busy of two."""
    two = able if len(able) <= 2 else draw.sample(able, 2)
    return min(two, key=lambda one: (one.load, one.last))

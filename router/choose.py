"""Which of several engines: the one that knows the most of a prompt, unless it has too much to do.

Without anything known it is the less busy of two drawn at random, which keeps several routers from all choosing the
same one on figures that are a moment old (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
Prompts that begin alike go to the same engine, the next one on a circle that has room (Mirrokni, Thorup and
Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018); media, several in a turn, by rendezvous hashing (Thaler
and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998). Either way, when an engine comes or goes,
only what it gets or had is moved.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

from router.roster import Able, Candidate

C = TypeVar("C", bound=Candidate)


def choose(able: Able[C], last: str | None, *, slack: float, prefix: bytes | None, draw: random.Random) -> C:
    """One of `able`, which are one or more: the conversation's last one, else one by how the prompt begins, else the
    less busy. Nobody gets a turn for what it knows while it has `slack` more to do than another, or is spared while
    another is not. `prefix` is a digest.
    """
    idle = idler(able, draw)
    if last is None and prefix is None:
        return idle
    most = idle.load + slack

    def may_have_it(one: C) -> bool:
        return one.load <= most and (idle.spared or not one.spared)

    if last is not None:
        own = able.find(last)
        return own if own is not None and may_have_it(own) else idle
    assert prefix is not None
    return next(filter(may_have_it, able.around(prefix)), idle)


def by_hash(able: Iterable[C], digest: bytes) -> C:
    """Always the same one for the same digest, as long as it is among them."""
    return max(able, key=lambda one: blake2b(one.url.encode(), key=digest, digest_size=8).digest())


def idler(able: Able[C], draw: random.Random) -> C:
    """The less busy of two that are not spared, if there are such."""
    idle, *others = able.two(draw)
    for other in others:
        mine, its = idle.load, other.load
        if its < mine or (its == mine and other.last < idle.last):
            idle = other
    return idle

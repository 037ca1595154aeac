"""The same plans, made by looking at every engine of the pools: what the quick way is held against."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence, Set

from router.capabilities import mismatch
from router.plan import OFFERED, Facts
from router.ring import CIRCLE, points_of
from router.roster import Candidate
from tests.unit.router.candidates import EngineView


def able_of(pool: Iterable[Candidate], model: str, avoid: Set[str]) -> list[Candidate]:
    return [one for one in pool if one.ready and model in one.models and one.url not in avoid]


def well_of(able: Sequence[Candidate]) -> Sequence[Candidate]:
    return [one for one in able if not one.spared] or able


def choose(able: Sequence[Candidate], last: str | None, slack: float, prefix: bytes | None, draw: random.Random) -> str:
    well = well_of(able)
    two = well if len(well) <= 2 else draw.sample(well, 2)
    idle = min(two, key=lambda one: (one.load, one.last))
    fit = [one for one in well if one.load <= idle.load + slack]
    if last is not None:
        return last if any(one.url == last for one in fit) else idle.url
    if prefix is not None:
        start = int.from_bytes(prefix[:8])
        return min(fit, key=lambda one: min((point - start) % CIRCLE for point in points_of(one.url))).url
    return idle.url


def plain_plan(
    facts: Facts,
    prefill: Sequence[EngineView],
    decode: Sequence[EngineView],
    *,
    draw: random.Random,
    avoid: Set[str] = frozenset(),
    slack: float = 4,
) -> tuple[str | None, str, bool] | None:
    """Prefill and decode engine, and whether blocks are pulled; None if there is no plan."""

    def chosen(able: Sequence[Candidate], last: str | None) -> Candidate:
        url = choose(able, last, slack, facts.prefix, draw)
        return next(one for one in able if one.url == url)

    def partners(decoder: Candidate, pool: Iterable[Candidate]) -> list[Candidate]:
        return [
            one
            for one in pool
            if mismatch(one.can, decoder.can) is None and not (facts.scale_out and one.can.scale_out is False)
        ]

    decoders = able_of(decode, facts.model, avoid)
    if not decoders:
        return None
    if facts.scale_out:
        decoders = [one for one in decoders if one.can.scale_out is not False] or decoders
    decoder = chosen(decoders, facts.last_decode)
    ready = able_of(prefill, facts.model, avoid)
    if not partners(decoder, ready) and (paired := [one for one in decoders if partners(one, ready)]):
        decoder = chosen(paired, facts.last_decode)
    prefillers = partners(decoder, ready)
    if not prefillers:
        listing = [one for one in prefill if facts.model in one.models]
        alone = ready and not any(partners(one, listing) for one in decoders)
        return (None, decoder.url, False) if alone else None
    prefiller = chosen(prefillers, facts.last_prefill)
    owner = next((one for one in decode if one.url == facts.last_decode and one.url not in avoid), None)
    pull = (
        facts.why in OFFERED
        and owner is not None
        and owner.readable
        and owner.has(facts.owner)
        and mismatch(prefiller.can, owner.can) is None
        and prefiller.pulls
    )
    return prefiller.url, decoder.url, pull

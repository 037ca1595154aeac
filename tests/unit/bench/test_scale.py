"""The fleet that plans are measured with."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from bench.scale import LENGTHS, SORTS, offer, record
from bench.scale_fleet import Fleet
from router.plan import make_plan
from router.record import Record, pack_offer, unpack_offer


@pytest.mark.parametrize("num_engines", [10, 200])
async def test_every_sort_of_turn_has_a_plan_and_engines_stay_busy(num_engines: int) -> None:
    fleet = Fleet(num_engines, 1000, seed=1)
    pool = fleet.pool
    plan = partial(make_plan, prefill=pool.rosters["prefill"], decode=pool.rosters["decode"], draw=pool.draw)
    reasons: Counter[str] = Counter()
    for _ in range(20 * num_engines):
        for facts_of in SORTS.values():
            made = plan(facts_of(fleet))
            reasons[made.reason] += 1
            fleet.serve(made)
            fleet.look()
    assert set(reasons) == {"new", "affinity", "spill", "moved"}
    assert sum(engine.in_flight for engine in pool.engines) == 8 * num_engines
    states = Counter(engine.state for engine in pool.engines)
    assert states["ready"] > 0.8 * num_engines


def test_what_is_put_into_redis_is_what_a_turn_leaves() -> None:
    saved, blocks = record(LENGTHS[0], 49_152), offer(LENGTHS[0])
    assert Record.unpack(saved.pack()) == saved
    assert unpack_offer(pack_offer(blocks)) == blocks

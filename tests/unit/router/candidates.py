"""Engines as a plan sees them, without any engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from hypothesis import strategies as st

from router import plan
from router.capabilities import UNKNOWN, Capabilities, Kind
from router.plan import Facts, Plan
from router.roster import Roster


class EngineView(NamedTuple):
    url: str
    ready: bool
    models: frozenset[str]
    load: float = 0
    last: int = 0
    can: Capabilities = UNKNOWN
    pulls: bool = True
    spared: bool = False
    readable: bool = True
    engine_id: str | None = None

    @property
    def in_rotation(self) -> bool:
        return self.ready

    def has(self, engine_id: str | None) -> bool:
        return engine_id is None or self.engine_id is None or engine_id == self.engine_id


def plan_over(
    facts: Facts,
    prefill: Sequence[EngineView],
    decode: Sequence[EngineView],
    *,
    draw: random.Random,
    **settings: Any,
) -> Plan:
    return plan.make_plan(facts, Roster(prefill), Roster(decode), draw=draw, **settings)


CAPABILITIES = st.builds(
    Capabilities,
    kind=st.sampled_from([None, *get_args(Kind)]),
    version=st.sampled_from([None, "0.32.0", "0.33.0"]),
    block_size=st.sampled_from([None, 16, 32]),
    kv_layout=st.sampled_from([None, "a", "b"]),
    bidirectional=st.sampled_from([None, False, True]),
    scale_out=st.sampled_from([None, False, True]),
)


def pools(role: str, *, most: int = 6) -> st.SearchStrategy[list[EngineView]]:
    view = st.builds(
        EngineView,
        url=st.sampled_from([f"{role}{number}" for number in range(most)]),
        ready=st.sampled_from([True, True, False]),
        models=st.sampled_from([frozenset("m"), frozenset("mn"), frozenset("n")]),
        load=st.integers(0, 9),
        can=CAPABILITIES,
        pulls=st.booleans(),
        spared=st.booleans(),
        readable=st.booleans(),
        engine_id=st.sampled_from([None, "e0", "e1"]),
    )
    return st.lists(view, max_size=most, unique_by=lambda one: one.url)

"""When no engine that could serve a turn is in rotation: the turn waits a moment for one to come back.

An engine that was lost lately is often back soon, and what it was ejected for may be over: a pool of two that loses
one while the other is under suspicion has not lost both. So turns of the first seconds of an outage are not failed but
held; in one that lasts they are answered at once.
"""

from __future__ import annotations

import asyncio

from router.context import Router
from router.plan import NoEngine, Plan
from router.request import Turn
from router.route import plan_turn


async def plan_in_time(router: Router, turn: Turn) -> Plan:
    """The plan, once there can be one. Raises APIError as `make_plan`, without waiting if it would be of no use."""
    waited = False
    while True:
        try:
            return plan_turn(router, turn)
        except NoEngine as none:
            seconds = _wait(router, turn, none)
            if seconds <= 0:
                raise
            if not waited:
                waited = True
                router.metrics.outage_waits.add(none.role)
            if not await _changed(router, none, seconds):
                raise


def is_short(router: Router, turn: Turn) -> bool:
    """Whether a plan can be made, or waited for."""
    try:
        plan_turn(router, turn)
    except NoEngine as none:
        return _wait(router, turn, none) > 0
    return True


async def _changed(router: Router, none: NoEngine, seconds: float) -> bool:
    """Wait for so long until the state of some engine is another, and whether it is."""
    for engine in router.pool.of(none.role):
        engine.hurry()
    try:
        async with asyncio.timeout(seconds):
            await router.pool.change()
    except TimeoutError:
        return False
    return True


def _wait(router: Router, turn: Turn, none: NoEngine) -> float:
    """Seconds for which it is worth waiting."""
    now = router.loop.time()
    lost = [
        engine.lost_at
        for engine in router.pool.of(none.role)
        if turn.model in engine.models and engine.url not in turn.avoid and not engine.drained_by
    ]
    return min(max(lost, default=0.0) + router.config.outage_wait, turn.deadline) - now

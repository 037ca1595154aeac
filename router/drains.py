"""An operator's word on which engines get no new turns, passed on to all processes of the router, and to those that are
started later."""

from __future__ import annotations

from typing import Any, Final

import orjson

from router.context import Router
from router.member import Role
from router.siblings import Answer

DRAIN: Final = "drain"

Json = dict[str, Any]


async def drain(router: Router, url: str, role: Role | None, *, on: bool) -> list[Json]:
    """Have an engine drained, or take that back; how it is now, in each of its roles, with what all processes have in
    flight there. Nothing if there is no such engine."""
    engines = router.pool.drain(url, role, on=on)
    told: dict[tuple[str, str], Json] = {
        (one.role, one.name): {"url": one.name, "role": one.role, "state": one.state, "in_flight": 0} for one in engines
    }
    for engine in engines:
        order = [engine.role, engine.url, engine.incarnation, on]
        for answer in await router.siblings.gather(DRAIN, orjson.dumps(order), keep=f"{engine.role} {engine.url}"):
            told[engine.role, engine.name]["in_flight"] += orjson.loads(answer)
    return list(told.values())


def answers(router: Router) -> Answer:
    """What a process does that is told so."""

    async def answer(body: bytes) -> bytes:
        role, url, incarnation, on = orjson.loads(body)
        engine = router.pool.drain_one(role, url, incarnation, on=on)
        return orjson.dumps(0 if engine is None else engine.in_flight)

    return answer

"""What a turn does about an engine that failed it, as long as its client has seen nothing."""

from __future__ import annotations

import logging
from typing import Final

from connectors.wire.openai import APIError
from router.context import Router
from router.faults import EngineFault, gone_for_now
from router.request import Turn
from router.route import plan_turn

MAX_FAULTS: Final = 2  # of either leg; a request that has killed two engines must not meet a third

log = logging.getLogger("router.turn")


def excuse(turn: Turn, fault: EngineFault) -> None:
    """A decode engine that was given blocks has failed, perhaps only at having them. Once in a turn that says nothing
    against it: the prompt is prefilled again, for the same one."""
    parked = fault.kind == "timeout" and fault.engine.looks_missed == 0  # it still answers others
    if (
        fault.engine.role == "decode"
        and not turn.excused
        and (parked or (fault.kind == "status" and fault.status == 500))
    ):
        turn.excused = fault.may_be_blocks = True


def retry(router: Router, turn: Turn, fault: EngineFault) -> None:
    """Go on without the engine that failed, or raise the fault if it was the second of its role or nobody is left.

    One that broke off is asked again if there is no other: only the connection may have been cut. If it has crashed it
    cannot be reached now.
    """
    if fault.may_be_blocks:
        # Likely it could not load the blocks it was given, which says nothing against the engine. They are gone now.
        _count(router, fault)
        return
    turn.faults[fault.engine.role] += 1
    if turn.faults[fault.engine.role] == MAX_FAULTS:
        raise fault
    turn.avoid.add(fault.engine.url)
    if not _can_go_on(router, turn):
        if fault.kind != "disconnected":
            raise fault
        turn.avoid.discard(fault.engine.url)
        if not _can_go_on(router, turn):
            raise gone_for_now(fault.engine) from fault
    _count(router, fault)
    failed = {"role": fault.engine.role, "engine": fault.engine.name, "fault": fault.kind}
    log.info("retry", extra={"request_id": turn.report.request_id, **failed})


def _count(router: Router, fault: EngineFault) -> None:
    """Raises the fault if too many turns were tried again of late."""
    if not router.budget.spend():
        router.metrics.retries_refused.add(fault.engine.role)
        raise fault
    router.metrics.retries.add(fault.engine.role)


def _can_go_on(router: Router, turn: Turn) -> bool:
    try:
        plan_turn(router, turn)
    except APIError:
        return False
    return True

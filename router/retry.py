"""What a turn does about an engine that failed it, as long as its client has seen nothing."""

from __future__ import annotations

import logging
from typing import Final

from router.context import Router
from router.faults import EngineFault, gone_for_now
from router.outage import is_short
from router.request import Turn

MAX_FAULTS: Final = 2  # of either leg; a request that has killed two engines must not meet a third
MAX_UNSENT: Final = 8  # engines of a role that could not be reached or had no room

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

    One that broke off or cannot be reached is asked again if there is no other: only the connection may have been cut,
    or it is being restarted.
    """
    if fault.may_be_blocks:
        # Likely it could not load the blocks it was given, which says nothing against the engine. They are gone now.
        _count(router, fault)
        return
    of_role = turn.unsent if fault.unsent else turn.faults
    of_role[fault.engine.role] += 1
    if turn.faults[fault.engine.role] == MAX_FAULTS or turn.unsent[fault.engine.role] == MAX_UNSENT:
        raise fault
    turn.avoid.add(fault.engine.url)
    if not is_short(router, turn):
        if fault.kind not in ("disconnected", "unreachable"):
            raise fault
        turn.avoid.discard(fault.engine.url)
        if not is_short(router, turn):
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

"""What a turn does about an engine that failed it, as long as its client has seen nothing."""

from __future__ import annotations

import logging
from typing import Final

from router.context import Router
from router.faults import EngineFault, Failure, gone_for_now
from router.outage import is_short
from router.request import Turn

MAX_FAULTS: Final = 2  # of either leg; a request that has killed two engines must not meet a third
MAX_CUT: Final = 4  # of either leg, those included that only the network is to blame for
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


def excuse_encodings(turn: Turn, fault: EngineFault) -> None:
    """An engine that was to fetch encodings has failed, perhaps only at that. Once in a turn they are made again, for
    the same one."""
    its_own = fault.kind == "params" or (fault.kind == "status" and fault.status == 500)
    if its_own and turn.encodings.params is not None and not turn.encodings_excused:
        turn.encodings_excused = fault.may_be_encodings = True


def retry(router: Router, turn: Turn, fault: EngineFault) -> None:
    """Go on without the engine that failed, or raise the fault if it was the second of its role or nobody is left.

    An engine that broke off and is seen to live on does not count: only the connection was cut, and it may be the one
    that is left.
    One that broke off or cannot be reached is asked again if there is no other: only the connection may have been cut,
    or it is being restarted.
    """
    if fault.may_be_blocks:
        router.metrics.transfer_failures.add(fault.engine.role, fault.kind)
        # Likely it could not load the blocks it was given, which says nothing against the engine. They are gone now.
        _count(router, turn, fault)
        return
    if fault.may_be_encodings:
        _count(router, turn, fault)
        return
    if _is_enough(turn, fault):
        raise fault
    turn.avoid.add(fault.engine.url)
    if not is_short(router, turn):
        if fault.kind not in ("disconnected", "unreachable"):
            raise fault
        turn.avoid.discard(fault.engine.url)
        if not is_short(router, turn):
            raise gone_for_now(fault.engine) from fault
    _count(router, turn, fault)
    failed = {"role": fault.engine.role, "engine": fault.engine.name, "fault": fault.kind}
    log.info("retry", extra={"request_id": turn.report.request_id, **failed})


def _is_enough(turn: Turn, fault: EngineFault) -> bool:
    """Whether engines of this role have failed the turn too often. Those that live on are not avoided any longer."""
    if fault.unsent:
        turn.unsent[fault.engine.role] += 1
        return turn.unsent[fault.engine.role] == MAX_UNSENT
    before = [one for one in turn.failures if one.engine.role == fault.engine.role]
    turn.failures.append(Failure.of(fault))
    alive = [one for one in before if one.was_survived]
    turn.avoid.difference_update(one.engine.url for one in alive)
    return len(before) - len(alive) + 1 >= MAX_FAULTS or len(before) + 1 >= MAX_CUT


def _count(router: Router, turn: Turn, fault: EngineFault) -> None:
    """Raises the fault if too many turns were tried again of late."""
    if not router.budget.spend():
        router.metrics.retries_refused.add(fault.engine.role)
        raise fault
    router.metrics.retries.add(fault.engine.role)
    if turn.report.span is not None:
        turn.report.span.retried(fault)

"""The plan of a turn: what it is made from, what its engines are told, and whether what has been computed still serves
it."""

from __future__ import annotations

from connectors.wire.transfer import KVTransferParams
from router.api.legs import BY_IDS_PATH, Body, Prefilled, prefill_by_ids
from router.capabilities import exchanges
from router.context import Router
from router.member import Engine
from router.plan import Facts, Plan, make_plan
from router.release import is_ours
from router.request import Turn


def plan_turn(router: Router, turn: Turn) -> Plan:
    config, pool, past = router.config, router.pool, turn.past
    record = past.claimed.record if past.claimed else None
    offer = past.claimed.offer if past.claimed else None
    facts = Facts(
        turn.model,
        turn.alone,
        last_prefill=turn.prefilled_by or (record.prefill if record else None),
        last_decode=record.decode if record else None,
        num_new=past.num_new,
        why=past.why,
        scale_out=turn.endpoint.name == "generate",
        refuses=offer is not None and is_ours(offer),
        owner=offer.remote_engine_id if offer else None,
        prefix=turn.conversation.prefix() if record is None else None,
    )
    return make_plan(
        facts,
        pool.rosters["prefill"],
        pool.rosters["decode"],
        draw=pool.draw,
        avoid=turn.avoid,
        slack=config.affinity_slack,
        has_prefill=pool.has("prefill"),
        served=pool.remembered,
        fallback=config.prefill_fallback == "decode",
        break_even=router.break_even.tokens,
    )


def prefill_leg(turn: Turn, engine: Engine, body: Body, params: KVTransferParams) -> tuple[str, Body]:
    """What a prefill engine is asked, and where. Engines of ours take a chat's ids inside the transfer params."""
    ids = turn.past.prompt_ids
    if ids is not None and turn.endpoint.name == "chat" and engine.can.kind == "vllm":
        return BY_IDS_PATH, prefill_by_ids(body, params.to_json(), ids)
    return turn.endpoint.path, turn.endpoint.prefill_leg(body, params, ids)


def alone_params(router: Router, turn: Turn, plan: Plan, engine: Engine) -> KVTransferParams | None:
    """What a decode engine is told that prefills for itself: the next turn may want its blocks."""
    nobody_asks = turn.alone is not None or not turn.may_go_on or not router.pool.has("prefill")
    if nobody_asks or not engine.is_ours(turn.model):
        return None
    past = turn.past
    if plan.reason != "short_suffix" or past.claimed is None or past.claimed.offer is None:
        return KVTransferParams.for_decode_alone()
    # What it holds ends within a block, and that block it computes again.
    slack = past.claimed.offer.remote_block_size or 0
    return KVTransferParams.for_decode_alone(max_prefill_tokens=(past.num_new or 0) + slack)


def is_prefill_due(router: Router, plan: Plan, prefilled: Prefilled | None) -> bool:
    """Whether the prompt is yet to be prefilled: it was not, or what was computed is of no use to this plan."""
    if plan.prefill is None:
        return False
    return prefilled is None or is_stale(router, prefilled) or not fits(router, prefilled, plan)


def fits(router: Router, prefilled: Prefilled, plan: Plan) -> bool:
    """Whether the decode engine that is to have the blocks can use them; when they were made it was another."""
    if prefilled.engine == plan.prefill:
        return True
    prefill, decode = router.pool.get("prefill", prefilled.engine), router.pool.get("decode", plan.decode)
    return exchanges(prefill.known.now, decode.known.now)


def is_stale(router: Router, prefilled: Prefilled) -> bool:
    age = router.loop.time() - prefilled.answered_at
    return age > router.config.dispatch_deadline

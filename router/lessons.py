"""What a turn's answers teach of the engines that gave them, and what the turn did without."""

from __future__ import annotations

from connectors.wire.transfer import KVTransferParams
from router.answer import Seen
from router.api.legs import Prefilled
from router.context import Router
from router.member import Engine
from router.request import Turn


def from_prefill(turn: Turn, engine: Engine, prefilled: Prefilled, offered: KVTransferParams | None) -> None:
    """A prefill leg was answered; `offered` are the blocks that it was given."""
    if _is_known_well(engine):
        return
    told_ids = None if turn.endpoint.name == "responses" else prefilled.prompt_token_ids is not None
    engine.known.saw_prefill(prefilled.params, told_ids=told_ids, offered=offered)


def from_pull_that_hung(engine: Engine) -> None:
    """A prefill leg that was offered blocks did not come to its end: one that cannot pull waits for ever."""
    if engine.known.now.bidirectional is not True:
        engine.known.saw("bidirectional", False)


def from_decode(router: Router, turn: Turn, engine: Engine, seen: Seen, offer: KVTransferParams | None) -> None:
    """A decode leg came to its end by itself."""
    if _is_known_well(engine) or turn.several or not seen.finished:
        return
    streamed = bool(turn.body.get("stream"))
    engine.known.saw_decode(
        offer,
        endpoint=turn.endpoint.name,
        pulled=turn.report.handoff,
        streamed=streamed,
        stop_reason=seen.stop_reason,
        told_ids=None if turn.endpoint.name == "responses" else bool(seen.output_token_ids),
    )
    if offer is None and turn.report.handoff:
        why = "stream_without_params" if streamed and engine.known.now.bidirectional else "one_way"
        router.metrics.lowered.add("remember", why)


def _is_known_well(engine: Engine) -> bool:
    """Whether it is one of ours, of which nothing is left to be learned."""
    known = engine.known.now
    return known.kind == "backhaul" and known.block_size is not None and known.kv_layout is not None

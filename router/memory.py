"""What a turn takes from the one before it, and leaves for the next.

The last turn's decode engine has offered its blocks; the offer is one of three things at any time: *in hand* here,
given to a prefill engine (which pulls or releases), or back in the store. However the turn ends, it ends in one of the
last two, or the blocks are released. Only what dies with this process, or with Redis, waits for the end of its lease,
and what its engine has no way to be told.
"""

from __future__ import annotations

import time
from array import array
from typing import Final

from connectors.wire.ids import ID_TYPE, TokenIds
from connectors.wire.openai import APIError
from connectors.wire.transfer import KVTransferParams
from router import lessons
from router.answer import Answer
from router.context import Router
from router.faults import EngineFault
from router.record import Record
from router.release import is_ours
from router.request import Turn
from router.store import Claimed, Saved
from router.verify import verify

OFFER_SHARE: Final = 15 / 16
"""Of an engine's promise to keep blocks, what a record lives: the router's clock starts later, and pulls take time."""


async def recall(router: Router, turn: Turn) -> None:
    """Find what is known of the conversation, for the time of this turn: until `settle`."""
    past = turn.past
    past.claimed = claimed = await router.store.claim(turn.conversation.find)
    if claimed is not None:
        router.holdings.taken(claimed.key)
        turn.report.turn = claimed.record.turn + 1
        past.in_hand = claimed.offer is not None
        past.why = "no_offer"


async def compare(router: Router, turn: Turn) -> None:
    """Compare the new prompt with what the last decode engine computed; what they share may be pulled."""
    past = turn.past
    claimed = past.claimed
    if claimed is None or turn.alone is not None or not router.pool.has("prefill"):
        return
    record, offer = claimed.record, claimed.offer
    if record.token_ids and not turn.media:
        past.prompt_ids = await _prompt_ids(router, turn, claimed)
    if offer is None:
        return
    if (turn.media or record.media) and not (is_ours(offer) and offer.remote_block_hashes):
        past.why = "media"  # placeholders are the same whatever the picture, and these engines would not notice
    elif past.prompt_ids is not None:
        found = verify(
            offer,
            record.token_ids,
            past.prompt_ids.numbers,
            least=router.config.kv_recompute_threshold,
            block_size=router.pool.block_size(record.decode) or router.config.kv_block_size,
        )
        past.num_known, past.offer, past.why = found.num_known, found.offer, found.why
    elif is_ours(offer) and offer.remote_block_hashes:
        past.offer, past.why = offer, "self_checked"
    else:
        past.why = "unverified"


async def _prompt_ids(router: Router, turn: Turn, claimed: Claimed) -> TokenIds | None:
    """The ids of the new prompt, as the engines will make them."""
    record = claimed.record
    engine = router.pool.one_ready(turn.model, rather=(record.prefill, record.decode))
    ours = engine is not None and engine.is_ours(turn.model)
    query = turn.endpoint.tokenize_body(turn.body, ours=ours)
    if isinstance(query, TokenIds):
        return query
    if engine is None or query is None or not (ours or claimed.offer):
        return None
    if ours:
        # A sampled answer is rarely what its own text would be tokenized to. Our engines then put the known ids in
        # the place of those of the same text, so that what was computed for them can be used.
        query = {**query, "known_token_ids": TokenIds.made_of(record.token_ids)}
    turn.report.enter("tokenize")
    ids = await router.upstream.tokenize(engine, query, turn.report.onto(turn.headers, engine.name))
    turn.report.enter("recall")
    return ids


def give(turn: Turn) -> KVTransferParams | None:
    """The offer for a prefill engine, which from here on sees to it."""
    if turn.past.offer is not None:
        turn.past.in_hand = False
    return turn.past.offer


def take_back(router: Router, turn: Turn, error: APIError) -> None:
    """The prefill engine that was given the offer failed. If it refused the request, or never got it, the offer is as
    good as before, or at worst refused to the next who claims it. Otherwise the blocks may be half read: they are let
    go."""
    past = turn.past
    if past.claimed is None:
        return
    if not isinstance(error, EngineFault) or error.unsent or error.status == 503:
        past.in_hand = True
    else:
        release(router, past.claimed.offer, may_be_read=error.kind != "status")
        past.lose()


async def remember(router: Router, turn: Turn, answer: Answer) -> None:
    """File what the next turn needs, and what this one leaves of the last; done also if the client leaves meanwhile."""
    report, seen = turn.report, answer.seen
    report.see_usage(seen)
    offer = _take_offer(answer)
    if turn.engine is not None:
        lessons.from_decode(router, turn, turn.engine, seen, offer)
    key = _key(turn, answer) if seen.finished and turn.may_go_on else None
    if key is None or report.decode is None:
        release(router, offer)
        return
    prompt = turn.past.prompt_ids if seen.prompt_token_ids is None else seen.prompt_token_ids
    token_ids = array(ID_TYPE) if prompt is None else prompt.numbers
    if prompt is not None and seen.output_ids_complete:
        token_ids = token_ids + seen.output_token_ids
    ttl = router.config.conversation_ttl
    if offer is not None and offer.remote_blocks_ttl is not None:
        ttl = min(ttl, OFFER_SHARE * offer.remote_blocks_ttl)
    last = turn.past.claimed
    # Of a turn without a prefill leg, the engine whose cache knows all but what was new.
    prefill = report.prefill or (last.record.prefill if last else None)
    record = Record(
        turn=report.turn,
        prefill=prefill,
        decode=report.decode,
        deadline=time.time() + ttl,
        token_ids=token_ids,
        media=turn.media,
    )

    def filed(saved: Saved) -> None:
        turn.remembered = saved.kept
        for orphan in saved.orphans:
            release(router, orphan, may_be_read=not saved.is_certain)
        if saved.kept and offer is not None and all(orphan is not offer for orphan in saved.orphans):
            if not is_ours(offer):  # those of ours were told how long, and give way to whoever needs the room
                router.sweeper.watch(key, saved.stamp, record.deadline)
            router.holdings.saved(key, saved.stamp, record.decode, offer, record.deadline)

    filed(await router.store.save(key, record, offer, left=filed))


def let_go(router: Router, answer: Answer) -> None:
    """Release what an answer offers that is not remembered: it was cut, or the client has left."""
    release(router, _take_offer(answer))


def _take_offer(answer: Answer) -> KVTransferParams | None:
    """The blocks of this turn that the decode engine holds for the next one; whoever asks sees to them."""
    params, answer.seen.params = answer.seen.params, None
    return params if params is not None and params.do_remote_decode else None


def _key(turn: Turn, answer: Answer) -> str | None:
    conversation = turn.conversation
    return conversation.find if conversation.named else conversation.file_under(answer.message)


def release(router: Router, blocks: KVTransferParams | None, *, may_be_read: bool = False) -> None:
    """Give blocks back that nobody will read, in the background. `may_be_read`: an engine was given them, and may not
    be done with them."""
    if blocks is not None:
        router.releases.start(blocks, may_be_read=may_be_read)


def settle(router: Router, turn: Turn) -> None:
    """An offer still in hand goes back, unless this turn's own has taken its place."""
    past = turn.past
    if past.claimed is None or not past.in_hand:
        return
    past.in_hand = False
    if turn.remembered:
        release(router, past.claimed.offer)
    else:
        router.background.start(_put_back(router, past.claimed))


async def _put_back(router: Router, claimed: Claimed) -> None:
    done = await router.store.put_back(claimed)
    if not done:
        release(router, claimed.offer, may_be_read=done is None)
    elif claimed.offer is not None:
        record = claimed.record
        router.holdings.saved(claimed.key, claimed.stamp, record.decode, claimed.offer, record.deadline)

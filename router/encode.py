"""Has a turn's media encoded, by encoders and at the same time, before an engine prefills its prompt.

What encoders answer says where their encodings lie; the engine that prefills fetches them from there. It has the media
too: what no encoder has encoded it encodes itself, so encoders save time and never decide whether there is an answer,
unless the settings say so. Each attempt of a turn begins with the client's body and asks anew: encoders have what they
encoded in their caches, and what they hold for others is theirs to let go of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Literal

from connectors.wire.openai import APIError, unavailable
from connectors.wire.transfer import ECTransferParams, WireError
from router import headers
from router.api.legs import Body
from router.choose import by_hash
from router.context import Router
from router.encodings import NONE, Encodings, Items, descriptions, match, merged
from router.faults import EngineFault
from router.media import Medium, find
from router.member import Engine
from router.plan import Plan
from router.request import Turn
from router.retry import MAX_FAULTS
from router.upstream import Leg

PATH: Final = "/v1/chat/completions"
AT_ONCE: Final = 16
"""Requests of one turn to encoders."""
PASSED_ON: Final = ("mm_processor_kwargs", "media_io_kwargs", "priority", "session_id")
"""Of the client's body: how media are prepared, which names what comes of it, and what is to come first."""
_PREPARATION: Final = PASSED_ON[:2]

Fallback = Literal["no_encoder", "incompatible", "failed", "ambiguous", "unannounced"]
"""Why the engine that prefills encodes: no encoder is ready for the model; none whose encodings it could use; they
failed; what they said could not be told apart; they said nothing of it."""

log = logging.getLogger("router.encode")


async def encode(router: Router, turn: Turn, plan: Plan, engine: Engine) -> Encodings:
    """Have encoded what `engine` has to prefill by this plan. Raises APIError: what encoders say against a medium, or
    503 where there must be encoders."""
    if not turn.media or not router.pool.has("encode"):
        return NONE
    media = find(turn.endpoint.history(turn.body))
    known = _num_known(turn, plan)
    due = [one for one in media if one.numbers[-1] >= known]
    turn.report.see_media(len(media), known=len(media) - len(due))
    router.metrics.media.add("known", by=len(media) - len(due))
    if not due:
        return NONE
    turn.report.enter("encode")
    work = _Work(router, turn)
    encoders = work.encoders(engine, due)
    found = await work.run(encoders, due) if encoders else {}
    rewrites = router.config.media_rewrite and not turn.raw_media and turn.endpoint.name == "chat"
    if not rewrites or len(due) < len(media) or any(turn.body.get(key) for key in _PREPARATION):
        return Encodings(merged(found))
    return Encodings(merged(found), descriptions(media, found))


def _num_known(turn: Turn, plan: Plan) -> int:
    """How many of the media, from the first, the engine that prefills has KV for, as far as can be told: it gets that
    of the last turn, or has it itself. Should it be lost, that engine has the media."""
    record = turn.past.claimed.record if turn.past.claimed else None
    if record is None or turn.alone is not None or turn.report.attempts > 1:
        return 0
    itself = plan.prefill == record.prefill if plan.prefill else plan.decode == record.decode
    if not (plan.pull or itself):
        return 0
    pairs = enumerate(zip(record.media, turn.media, strict=False))
    return next((at for at, (before, now) in pairs if before != now), min(len(record.media), len(turn.media)))


class _Work:
    """One attempt's requests to encoders."""

    def __init__(self, router: Router, turn: Turn) -> None:
        self._router = router
        self._turn = turn
        self._room = asyncio.Semaphore(AT_ONCE)
        self._num_requests = 0
        self._able: list[Engine] = []
        self._found: dict[bytes, Items] = {}

    def encoders(self, engine: Engine, media: Sequence[Medium]) -> list[Engine]:
        """Those that can encode for this engine."""
        turn, kind = self._turn, engine.can.kind
        ready = [one for one in self._router.pool.encode if one.ready and turn.model in one.models]
        if not ready:
            self._leave("no_encoder", media)
        able = [one for one in ready if kind is None or one.can.kind in (kind, None)]
        if ready and not able:
            self._leave("incompatible", media)
        self._able = [one for one in able if not one.spared] or able
        return self._able

    async def run(self, encoders: Sequence[Engine], media: Sequence[Medium]) -> dict[bytes, Items]:
        """What is told of them, by their keys. The first error there is ends all of it."""
        dealt = deal(media, encoders, slack=self._router.config.affinity_slack)
        try:
            async with asyncio.TaskGroup() as group:
                for engine, its_own in dealt:
                    for batch in batches(its_own, self._router.config.encode_batch):
                        group.create_task(self._encode(engine, batch))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._router.metrics.media.add("encoded", by=len(self._found))
        self._turn.report.media_encoded = len(self._found) or None
        return self._found

    async def _encode(self, engine: Engine, media: list[Medium]) -> None:
        """By this encoder, or by another if it fails; if that does too, the media are left."""
        router, tried = self._router, {engine.url}
        while True:
            try:
                async with self._room:
                    return await self._ask(engine, media)
            except EngineFault as fault:
                router.pool.blame(fault)
                self._avoid(fault)
                others = [one for one in self._able if one.ready and one.url not in tried]
                if not others or len(tried) == MAX_FAULTS or not router.budget.spend():
                    return self._leave("failed", media, fault)
                router.metrics.retries.add("encode")
                engine = by_hash(others, media[0].key)
                tried.add(engine.url)

    def _avoid(self, fault: EngineFault) -> None:
        """Raises the fault if these media have likely ended two encoders: they must not meet a third engine."""
        if fault.kind == "disconnected":
            self._turn.encoders_lost.add(fault.engine.url)
            if len(self._turn.encoders_lost) >= MAX_FAULTS:
                raise _final(fault) from fault

    async def _ask(self, engine: Engine, media: list[Medium]) -> None:
        told = await self._request(engine, media)
        found = match(media, told)
        if found is None and len(media) > 1:  # which is which; encoded they are
            for one in media:
                await self._ask(engine, [one])
        elif found is None:
            self._leave("ambiguous", media)
        else:
            self._found.update(found)
            if missing := [one for one in media if one.key not in found]:
                self._leave("unannounced", missing)

    async def _request(self, engine: Engine, media: Sequence[Medium]) -> ECTransferParams:
        turn, upstream = self._turn, self._router.upstream
        number, self._num_requests = self._num_requests, self._num_requests + 1
        lines = headers.child(turn.headers, turn.report.request_id, turn.name, number)
        turn.report.see_encoder(engine.name)
        outcome = "cancelled"
        leg = Leg(upstream, engine, min(upstream.loop.time() + self._router.config.encode_timeout, turn.deadline))
        try:
            await leg.send(PATH, child_body(turn, media), turn.report.onto(lines, engine.name))
            told = (await leg.whole()).get("ec_transfer_params")
            params = ECTransferParams.parse({} if told is None else told)
            outcome = "ok"
            return params
        except EngineFault:
            outcome = "failed"
            raise
        except APIError:
            outcome = "refused"
            raise
        except WireError as error:
            outcome = "failed"
            log.warning("encoder params not usable", extra={"engine": engine.name, "why": str(error)})
            raise upstream.fault(engine, "nonsense", 502, "told nonsense of what it encoded") from error
        finally:
            leg.end()
            self._router.metrics.encode_legs.add(outcome)

    def _leave(self, why: Fallback, media: Sequence[Medium], fault: EngineFault | None = None) -> None:
        """To the engine that prefills; raises APIError if it is not to encode."""
        self._router.metrics.encode_fallbacks.add(why)
        if self._router.config.encode_required:
            nobody = unavailable(f"No encode engine is ready for `{self._turn.model}` now. Try again in a moment.")
            raise nobody if fault is None else _final(fault)
        self._router.metrics.media.add("local", by=len(media))
        self._turn.report.see_local(why, len(media))


def deal(media: Sequence[Medium], encoders: Sequence[Engine], *, slack: float) -> list[tuple[Engine, list[Medium]]]:
    """Each goes where it would always go, and may be in a cache, unless that encoder has `slack` more to do than
    another."""
    given: dict[str, list[Medium]] = {one.url: [] for one in encoders}
    for medium in media:
        work = {one.url: one.load + len(given[one.url]) for one in encoders}
        most = min(work.values()) + slack
        given[by_hash([one for one in encoders if work[one.url] <= most], medium.key).url].append(medium)
    return [(one, given[one.url]) for one in encoders if given[one.url]]


def batches(media: Sequence[Medium], limit: int) -> list[list[Medium]]:
    """One request each. `limit`: most pictures in one; 0: any number."""
    pictures = [one for one in media if one.kind == "image"]
    size = limit or len(pictures) or 1
    together = [pictures[start : start + size] for start in range(0, len(pictures), size)]
    return together + [[one] for one in media if one.kind != "image"]


def child_body(turn: Turn, media: Sequence[Medium]) -> Body:
    """Nothing but media, and what decides how they are prepared."""
    content = [one.part for one in media]
    passed = {key: turn.body[key] for key in PASSED_ON if turn.body.get(key) is not None}
    model = {"model": turn.model} if turn.model else {}
    return {**model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "stream": False, **passed}


def _final(fault: EngineFault) -> APIError:
    """The same error, of which nothing is to be tried again."""
    return APIError(fault.status, fault.message, type=fault.type, param=fault.param, headers=fault.headers)

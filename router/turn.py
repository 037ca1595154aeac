"""One turn through the front door, top to bottom: recall, compare, plan, prefill, decode, remember."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import Any, Final

from aiohttp import web

from connectors.wire import sse
from connectors.wire.ids import TokenIds
from connectors.wire.note import OUTPUT, TOKEN_NOTE
from connectors.wire.openai import APIError, error_body
from connectors.wire.transfer import PREFIX_CACHE_MISS, KVTransferParams
from router import headers, jsontext, lessons, memory
from router.admission import Gate
from router.answer import Answer
from router.api.legs import Endpoint, Prefilled
from router.context import Request, Router, finish_headers
from router.encode import encode
from router.encodings import NONE
from router.faults import EngineFault
from router.member import Engine
from router.names import shown
from router.outage import plan_in_time
from router.plan import Plan
from router.relay import StreamRelay
from router.report import Report
from router.request import Turn, read_turn
from router.retry import excuse, excuse_encodings, retry
from router.route import alone_params, is_prefill_due, plan_turn, prefill_leg
from router.upstream import Decoding
from router.whole import WholeResponse

UNHURRIED_BYTES: Final = 1 << 14  # on their way to a client: with no more than these a write does not wait for it

log = logging.getLogger("router.turn")


async def run_turn(router: Router, request: Request, endpoint: Endpoint) -> web.StreamResponse:
    """Answer one request, and settle what it leaves behind however it ends."""
    report = Report(request.id, endpoint.name)
    if router.tracing is not None:
        router.tracing.begin(report, request.headers)
    router.budget.deposit()
    try:
        with router.turns:
            turn = await read_turn(router, request, endpoint, report)
            router.running.add(turn)
            try:
                return await serve(router, request, turn)
            finally:
                router.running.remove(turn)
    except APIError as error:
        report.status = error.status
        report.outcome = "failed" if error.status >= 500 else "rejected"
        raise
    except web.HTTPException as error:
        report.status, report.outcome = error.status, "rejected"
        raise
    except (asyncio.CancelledError, ConnectionResetError):
        if report.outcome == "failed":  # else it had all of its answer, or was told that there is no more
            report.status, report.outcome = 499, "client_gone"
        raise
    except Exception:
        report.status = 500
        raise
    finally:
        router.recent.add(report, report.settle(router.metrics))
        if report.span is not None:
            report.span.end(report)


async def serve(router: Router, request: Request, turn: Turn) -> web.StreamResponse:
    try:
        await enter(router, turn, router.decode_gate)
        try:
            turn.report.enter("recall")
            await memory.recall(router, turn)
            try:
                await memory.compare(router, turn)
                return await answer(router, request, turn)
            finally:
                memory.settle(router, turn)
        finally:
            router.decode_gate.leave()
    except asyncio.CancelledError:
        if turn.aborted and turn.task.uncancel() == 0:  # by a request of its client, who is still there
            raise aborted() from None
        raise


async def answer(router: Router, request: Request, turn: Turn) -> web.StreamResponse:
    """Plan, prefill, decode; once more on other engines if one fails before the client has seen anything."""
    prefilled: Prefilled | None = None
    try:
        while True:
            if turn.aborted:
                raise aborted()
            turn.report.attempts += 1
            plan, prefill_is_due = await plan_with_room(router, turn, prefilled)
            turn.report.model = shown(turn.model)
            decoder = router.pool.get("decode", plan.decode)
            try:
                if plan.prefill is None:
                    prefilled = None
                elif prefill_is_due:
                    try:
                        with router.pool.expecting(decoder):
                            prefilled = await prefill(router, turn, plan, plan.prefill)
                    finally:
                        router.prefill_gate.leave()
                    if not decoder.ready:  # any more: another gets the blocks
                        turn.report.attempts -= 1
                        continue
                return await decode(router, request, turn, plan, prefilled, decoder)
            except EngineFault as fault:
                if router.loop.time() >= turn.deadline:
                    raise  # whoever would be asked next has no time
                router.pool.blame(fault)
                if prefilled is not None and prefilled.params is not None:
                    excuse(turn, fault)
                if fault.engine.role == "prefill" or prefilled is None or turn.encodings.rewrites:
                    excuse_encodings(turn, fault)
                turn.raw_media |= turn.encodings.rewrites
                retry(router, turn, fault)
                if not fault.unsent:
                    prefilled = None  # a decode engine may have read the blocks, and they can be read once
            except APIError as error:
                if turn.encodings.rewrites and not turn.raw_media:
                    turn.raw_media, prefilled = True, None  # it may be the descriptions that are refused
                    continue
                if plan.prefill is not None or error.code != PREFIX_CACHE_MISS or turn.past.num_known == 0:
                    raise
                router.metrics.transfer_failures.add("decode", PREFIX_CACHE_MISS)
                turn.past.num_known = 0  # the decode engine has lost what it was left alone for
    finally:
        give_back(router, turn)


async def enter(router: Router, turn: Turn, gate: Gate) -> bool:
    """Wait until there is room in a pool, and whether that took time. `gate.leave` afterwards."""
    if gate.enter_freely():
        return False
    due = router.loop.time() + router.config.queue_timeout
    turn.report.enter("queue")
    return await gate.enter(turn.priority, min(due, turn.deadline))


async def plan_with_room(router: Router, turn: Turn, prefilled: Prefilled | None) -> tuple[Plan, bool]:
    """The plan, and whether the prompt is to be prefilled: then there is room for it in the pool. If that took time,
    other engines may be the better ones by now."""
    gate = router.prefill_gate
    plan = await plan_in_time(router, turn)
    is_due = is_prefill_due(router, plan, prefilled)
    if is_due and await enter(router, turn, gate):
        try:
            plan = plan_turn(router, turn)
        except APIError:
            gate.leave()
            raise
        is_due = is_prefill_due(router, plan, prefilled)
        if not is_due:
            gate.leave()
    return plan, is_due


async def prefill(router: Router, turn: Turn, plan: Plan, url: str) -> Prefilled:
    """Have the prompt's KV computed and held for a decode engine; what the last one offers is pulled, not computed."""
    give_back(router, turn)
    report, engine = turn.report, router.pool.get("prefill", url)
    report.restart()
    turn.encodings = await encode(router, turn, plan, engine) if turn.media else NONE
    report.prefill, report.kv = url, plan.kv
    report.enter("prefill")
    offer = memory.give(turn) if plan.pull else None
    seen = turn.encodings.shown(turn.body)
    path, leg = prefill_leg(turn, engine, seen, KVTransferParams.for_prefill(offer))
    body = turn.encodings.put_into(leg)
    turn.engine = engine

    def left(prefilled: Prefilled | None) -> None:
        # What the engine was offered it may not have looked at.
        memory.release(router, offer if prefilled is None else prefilled.params, may_be_read=True)

    def unsent() -> None:
        turn.past.in_hand = offer is not None

    try:
        with engine.known.given_blocks() if offer is not None else nullcontext():
            prefilled = await router.upstream.prefill(
                engine,
                path,
                body,
                report.onto(turn.headers, engine.name),
                known=turn.past.prompt_ids,
                deadline=_prefill_deadline(router, turn, offer),
                left=left,
                unsent=unsent,
            )
    except APIError as error:
        if offer is not None:
            memory.take_back(router, turn, error)
            if isinstance(error, EngineFault):
                error.may_be_blocks = error.kind in ("status", "params", "timeout") and error.status != 503
                if error.kind == "timeout" and engine.looks_missed == engine.in_flight == 0:  # nothing else held it up
                    lessons.from_pull_that_hung(engine)
        raise
    turn.prefilled_by = url
    lessons.from_prefill(turn, engine, prefilled, offer)
    turn.blocks = prefilled.params
    turn.engine = None
    if turn.aborted:
        raise aborted()
    if offer is not None:
        turn.past.lose()
    if prefilled.params is None:
        router.metrics.handoff_missing.add(turn.endpoint.name)
    elif (num_computed := report.see_prefill(prefilled)) is not None:
        router.break_even.observe(num_computed, prefilled.seconds)
    return prefilled


async def decode(
    router: Router, request: Request, turn: Turn, plan: Plan, prefilled: Prefilled | None, engine: Engine
) -> web.StreamResponse:
    """Have the answer made, pulling the KV where there is any, and pass it on."""
    report = turn.report
    report.decode, report.reason = plan.decode, plan.reason
    report.prefill = prefilled.engine if prefilled else None
    report.handoff = prefilled is not None and prefilled.params is not None
    ids = turn.past.prompt_ids
    if prefilled is None:
        report.restart()
        report.kv = plan.kv
        turn.encodings = await encode(router, turn, plan, engine) if turn.media else NONE
    elif prefilled.prompt_token_ids is not None:
        ids = prefilled.prompt_token_ids
    router.metrics.plans.add(plan.reason, report.kv or "")
    if plan.lack is not None:
        router.metrics.lowered.add(*plan.lack)
    params = prefilled.params if prefilled else None
    if params is None:
        params = alone_params(router, turn, plan, engine)
    ours = engine.is_ours(turn.model)
    body = turn.endpoint.decode_leg(turn.encodings.shown(turn.body), params, ids, ours=ours)
    if ours and params is not None:
        wish = body["kv_transfer_params"]
        if turn.may_go_on:
            wish["remote_blocks_ttl"] = router.config.conversation_ttl / memory.OFFER_SHARE
        else:
            wish["offer_blocks"] = False
    if prefilled is None or turn.encodings.rewrites:
        body = turn.encodings.put_into(body)
    answer = turn.endpoint.answer(turn.body, ours=ours, expose=router.config.expose_transfer_params)
    answer.keeps_message = not turn.several and turn.conversation.goes_by_content
    if body.get(TOKEN_NOTE) == OUTPUT:
        answer.seen.prompt_token_ids = ids
    turn.engine = engine
    report.enter("decode")
    leg = await router.upstream.decode(
        engine, turn.endpoint.path, body, report.onto(turn.headers, engine.name), deadline=turn.deadline
    )
    try:
        if turn.body.get("stream"):
            await leg.begun()
            if leg.is_events:
                turn.blocks = None
                return await pass_on(router, request, turn, leg, answer)
        return await pass_whole(router, turn, leg, answer, ids)
    finally:
        if leg.is_accepted:
            turn.blocks = None
        leg.end()
        memory.let_go(router, answer)


async def pass_whole(router: Router, turn: Turn, leg: Decoding, answer: Answer, ids: TokenIds | None) -> WholeResponse:
    """`ids`: what those of the prompt probably are."""
    body = await leg.whole(turn.deadline, known=ids)
    turn.answered = True
    answer.take(body)
    turn.report.enter("remember")
    await memory.remember(router, turn, answer)
    turn.report.outcome = "ok"
    return WholeResponse(_answer_headers(turn, leg), jsontext.dumps(body))


async def pass_on(router: Router, request: Request, turn: Turn, leg: Decoding, answer: Answer) -> web.StreamResponse:
    """Send the events on as they come. Once the first has left there is no way back: what fails then ends the
    stream with an error event."""
    relay = StreamRelay(answer)
    time_of, came = router.loop.time, 0.0
    pieces = router.metrics.piece_seconds.of(router.metrics.model(turn.model))
    response = web.StreamResponse()
    failure: dict[str, Any] | None = None
    try:
        while chunk := await leg.chunk():
            now = time_of()
            if came:
                pieces.observe(now - came)
            came = now
            out = relay.feed(chunk)
            if not response.prepared:
                if answer.seen.error is not None:
                    raise leg.refusal(answer.seen.error)
                if out:
                    await _begin(router, request, response, turn, leg, answer)
            if out:
                await _send(request, response, turn, out)
            if relay.done:
                break
        if not response.prepared:
            if not relay.done:
                raise leg.ended_early()
            await _begin(router, request, response, turn, leg, answer)
    except ConnectionResetError:
        raise
    except asyncio.CancelledError:
        if not (response.prepared and turn.aborted and turn.task.uncancel() == 0):
            raise
        failure = aborted().body()
    except Exception as error:
        if not response.prepared:
            raise
        failure = _told(turn, error)
        if isinstance(error, EngineFault):
            router.pool.blame(error)
    turn.answered = True
    end = relay.finish(failure)
    if relay.complete:
        turn.report.enter("remember")
        await memory.remember(router, turn, answer)
    turn.report.outcome = "ok" if relay.complete else "cut"
    await _send(request, response, turn, end)
    await response.write_eof()
    if relay.complete:
        await leg.drain()
    return response


def aborted() -> APIError:
    return APIError(409, "The request was aborted, as asked.", type="ConflictError", code="aborted")


def give_back(router: Router, turn: Turn) -> None:
    """No decode engine has taken the blocks that are held for it."""
    if turn.blocks is not None:
        memory.release(router, turn.blocks)
        turn.blocks = None


def _prefill_deadline(router: Router, turn: Turn, offer: KVTransferParams | None) -> float:
    """An engine that waits for blocks which do not come may do so for minutes; without them it would have computed."""
    if offer is None:
        return turn.deadline
    return min(turn.deadline, router.loop.time() + router.config.pull_timeout)


def _answer_headers(turn: Turn, leg: Decoding) -> list[tuple[str, str]]:
    passed = headers.back(leg.response.headers)
    return [*passed, *turn.report.explain().items()] if turn.explain else passed


async def _begin(
    router: Router, request: Request, response: web.StreamResponse, turn: Turn, leg: Decoding, answer: Answer
) -> None:
    turn.report.see_start(answer.seen)
    response.headers.extend(_answer_headers(turn, leg))
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    finish_headers(router, request, response)
    await response.prepare(request)


async def _send(request: Request, response: web.StreamResponse, turn: Turn, data: bytes) -> None:
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() + len(data) < UNHURRIED_BYTES:
        await response.write(data)
        return
    try:
        async with asyncio.timeout_at(turn.deadline):
            await response.write(data)
    except TimeoutError:  # the client does not read
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError from None


def _told(turn: Turn, error: Exception) -> dict[str, Any]:
    """The error event's content for what went wrong in the middle of a stream."""
    if isinstance(error, APIError):
        return error.body()
    if isinstance(error, sse.SSEError):
        return error_body(f"The answer was cut off: {error}.", type="InternalServerError", code=502)
    log.exception("failed in mid-stream", extra={"request_id": turn.report.request_id})
    return error_body("The answer was cut off by an internal error.", type="InternalServerError", code=500)

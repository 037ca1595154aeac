"""One turn through the front door, top to bottom: recall, plan, prefill, decode, remember."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from aiohttp import web
from multidict import CIMultiDict

from connectors.wire import sse
from connectors.wire.openai import APIError, bad_request, error_body
from connectors.wire.transfer import KVTransferParams
from router import headers, jsontext
from router.api.legs import Endpoint, Prefilled, wants_usage, without_engine_talk
from router.body import read_object
from router.context import REQUEST_ID, ROUTER, Router
from router.conversation import Conversation, Record, Scope, identify, name_of, pack_ids
from router.plan import Facts, Plan, make_plan
from router.relay import Answer, StreamRelay
from router.report import Report
from router.upstream import EngineFault, Stream, gone_for_now

TENANT: Final = "default"
MAX_FAULTS: Final = 2  # of either leg; a request that has killed two engines must not meet a third
LEAVING_SECONDS: Final = 0.5
SOLO: Final = frozenset({"several_choices", "several_prompts", "beam_search"})  # no one answer to go on from

log = logging.getLogger("router.turn")


@dataclass(slots=True)
class Turn:
    """One turn as the client asked for it, and what is known of it so far."""

    endpoint: Endpoint
    body: dict[str, Any]
    """The client's, without what only router and engines may say to each other."""
    headers: CIMultiDict[str]
    """For both legs."""
    model: str
    alone: str | None
    conversation: Conversation
    explain: bool
    deadline: float
    report: Report
    record: Record | None = None
    """Of the turn before."""
    remembered: bool = False
    blocks: KVTransferParams | None = None
    """Held for this turn by a prefill engine, and not taken by a decode engine yet."""
    avoid: set[str] = field(default_factory=set)
    """Engines that failed this turn."""
    faults: Counter[str] = field(default_factory=Counter)
    """How many, by role."""

    def new_answer(self) -> Answer:
        return Answer(keep_token_ids=bool(self.body.get("return_token_ids")), keep_usage=wants_usage(self.body))


async def run_turn(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    """Answer one request, and settle what it leaves behind however it ends."""
    router = request.app[ROUTER]
    report = Report(request[REQUEST_ID], endpoint.name)
    try:
        with router.turns:
            turn = await read_turn(router, request, endpoint, report)
            async with recall(router, turn):
                return await answer(router, request, turn)
    except APIError as error:
        report.status = error.status
        report.outcome = "failed" if error.status >= 500 else "rejected"
        raise
    except web.HTTPException as error:
        report.status, report.outcome = error.status, "rejected"
        raise
    except (asyncio.CancelledError, ConnectionResetError):
        report.status, report.outcome = 499, "client_gone"
        raise
    except Exception:
        report.status = 500
        raise
    finally:
        report.settle(router.metrics)


async def read_turn(router: Router, request: web.Request, endpoint: Endpoint, report: Report) -> Turn:
    body = await read_object(request, router.config.max_body_bytes)
    body = without_engine_talk(body)
    name = name_of(body, request.headers)
    body.pop("conversation_id", None)
    model = _model(router, body)
    salt = body.get("cache_salt")
    scope = Scope(TENANT, model, salt if isinstance(salt, str) else None)
    return Turn(
        endpoint=endpoint,
        body=body,
        headers=headers.onward(request.headers, report.request_id),
        model=model,
        alone=endpoint.alone(body),
        conversation=identify(scope, name, endpoint.history(body)),
        explain=request.headers.get("X-Backhaul-Explain") == "1",
        deadline=asyncio.get_running_loop().time() + router.config.turn_timeout,
        report=report,
    )


@asynccontextmanager
async def recall(router: Router, turn: Turn) -> AsyncIterator[None]:
    """Take the conversation's record for this turn. A turn that leaves no new one puts it back."""
    turn.record = record = await router.store.claim(turn.conversation.find)
    if record is not None:
        turn.report.turn = record.turn + 1
    try:
        yield
    finally:
        if record is not None and turn.conversation.find is not None and not turn.remembered:
            router.background.start(router.store.save(turn.conversation.find, record, unless_newer=True))


async def answer(router: Router, request: web.Request, turn: Turn) -> web.StreamResponse:
    """Plan, prefill, decode; once more on other engines if one fails before the client has seen anything."""
    prefilled: Prefilled | None = None
    try:
        while True:
            turn.report.attempts += 1
            plan = plan_turn(router, turn)
            turn.report.model = turn.model
            try:
                if plan.prefill is None:
                    prefilled = None
                elif prefilled is None or _stale(router, prefilled):
                    prefilled = await prefill(router, turn, plan.prefill)
                return await decode(router, request, turn, plan, prefilled)
            except EngineFault as fault:
                retry(router, turn, fault)
                if not fault.unsent:
                    prefilled = None  # a decode engine may have read the blocks, and they can be read once
    finally:
        give_back(router, turn)


def plan_turn(router: Router, turn: Turn) -> Plan:
    config, record = router.config, turn.record
    facts = Facts(
        turn.model,
        turn.alone,
        last_prefill=record.prefill if record else None,
        last_decode=record.decode if record else None,
    )
    return make_plan(
        facts,
        [engine.view() for engine in router.pool.prefill],
        [engine.view() for engine in router.pool.decode],
        avoid=turn.avoid,
        slack=config.affinity_slack,
        fallback=config.prefill_fallback == "decode",
    )


async def prefill(router: Router, turn: Turn, url: str) -> Prefilled:
    """Have the prompt's KV computed and held for a decode engine."""
    give_back(router, turn)
    report, engine = turn.report, router.pool.get("prefill", url)
    report.prefill = url
    body = turn.endpoint.prefill_leg(turn.body)
    leg = asyncio.create_task(
        router.upstream.prefill(engine, turn.endpoint.path, body, turn.headers, deadline=turn.deadline)
    )
    try:
        prefilled = await asyncio.shield(leg)
    except asyncio.CancelledError:
        router.background.start(leave(router, leg))
        raise
    turn.blocks = prefilled.params
    if prefilled.params is None:
        router.metrics.handoff_missing.labels(turn.endpoint.name).inc()
    else:
        report.cached_tokens = prefilled.params.remote_prefill_cached_tokens
    report.prompt_tokens = len(prefilled.prompt_token_ids or ()) or None
    return prefilled


async def leave(router: Router, leg: asyncio.Task[Prefilled]) -> None:
    """End a prefill leg nobody waits for. An answer may be on its way, and only it says which blocks to give back;
    a prompt that takes longer is aborted by closing the connection."""
    await asyncio.wait([leg], timeout=LEAVING_SECONDS)
    leg.cancel()
    try:
        prefilled = await leg
    except (asyncio.CancelledError, APIError):
        return
    if _can_be_released(prefilled.params):
        await router.upstream.release(prefilled.params)


async def decode(
    router: Router, request: web.Request, turn: Turn, plan: Plan, prefilled: Prefilled | None
) -> web.StreamResponse:
    """Have the answer made, pulling the KV where there is any, and pass it on."""
    report, engine = turn.report, router.pool.get("decode", plan.decode)
    report.decode, report.reason = plan.decode, plan.reason
    report.prefill = prefilled.engine if prefilled else None
    report.handoff = prefilled is not None and prefilled.params is not None
    router.metrics.plans.labels(plan.reason).inc()
    body = turn.endpoint.decode_leg(turn.body, prefilled)
    async with router.upstream.decode(engine, turn.endpoint.path, body, turn.headers, deadline=turn.deadline) as stream:
        turn.blocks = None
        if turn.body.get("stream") and stream.is_events:
            return await pass_on(router, request, turn, stream)
        return await pass_whole(router, turn, stream)


async def pass_whole(router: Router, turn: Turn, stream: Stream) -> web.Response:
    body = await stream.whole()
    answer = turn.new_answer()
    answer.take(body)
    await remember(router, turn, answer)
    turn.report.outcome = "ok"
    return web.Response(body=jsontext.dumps(body), headers=_answer_headers(turn, stream))


async def pass_on(router: Router, request: web.Request, turn: Turn, stream: Stream) -> web.StreamResponse:
    """Send the events on as they come. Once the first has left there is no way back: what fails then ends the
    stream with an error event."""
    answer = turn.new_answer()
    relay = StreamRelay(answer)
    response = web.StreamResponse()
    failure: dict[str, Any] | None = None
    try:
        async for chunk in stream.chunks():
            out = relay.feed(chunk)
            if not response.prepared:
                if answer.error is not None:
                    raise stream.refusal(answer.error)
                if out:
                    await _begin(request, response, turn, stream, answer)
            if out:
                await _send(request, response, turn, out)
            if relay.done:
                break
        if not response.prepared:
            if not relay.done:
                raise stream.ended_early()
            await _begin(request, response, turn, stream, answer)
    except ConnectionResetError:
        raise
    except Exception as error:
        if not response.prepared:
            raise
        failure = _told(turn, error)
    end = relay.finish(failure)
    if relay.complete:
        await remember(router, turn, answer)
    turn.report.outcome = "ok" if relay.complete else "cut"
    await _send(request, response, turn, end)
    await response.write_eof()
    return response


async def remember(router: Router, turn: Turn, answer: Answer) -> None:
    """File what the next turn needs under the conversation it will be found by."""
    report = turn.report
    report.see_usage(answer.usage, len(answer.prompt_token_ids or ()), len(answer.output_token_ids))
    key = turn.conversation.file_under(answer.message)
    if key is None or turn.alone in SOLO or not answer.finished or report.decode is None:
        return
    record = Record(
        turn=report.turn,
        prefill=report.prefill,
        decode=report.decode,
        deadline=time.time() + router.config.conversation_ttl,
        prompt_ids=_packed(answer.prompt_token_ids),
        output_ids=_packed(answer.output_token_ids) if answer.output_ids_complete else b"",
        params=answer.params.to_json() if answer.params and answer.params.do_remote_decode else None,
    )
    turn.remembered = await router.store.save(key, record)


def retry(router: Router, turn: Turn, fault: EngineFault) -> None:
    """Go on without the engine that failed, or raise the fault if it was the second of its role or nobody is left.

    One that broke off is asked again if there is no other and it may never have seen the request.
    """
    turn.faults[fault.engine.role] += 1
    if turn.faults[fault.engine.role] == MAX_FAULTS:
        raise fault
    turn.avoid.add(fault.engine.url)
    if not _can_go_on(router, turn):
        if fault.kind != "disconnected":
            raise fault
        turn.avoid.discard(fault.engine.url)
        if not fault.stale or not _can_go_on(router, turn):
            raise gone_for_now(fault.engine) from fault
    router.metrics.retries.labels(fault.engine.role).inc()
    failed = {"role": fault.engine.role, "engine": fault.engine.url, "fault": fault.kind}
    log.info("retry", extra={"request_id": turn.report.request_id, **failed})


def give_back(router: Router, turn: Turn) -> None:
    """Release blocks nobody will read, in the background. Engines that do not offer it free them by lease."""
    if _can_be_released(turn.blocks):
        router.background.start(router.upstream.release(turn.blocks))
    turn.blocks = None


def _can_be_released(blocks: KVTransferParams | None) -> TypeGuard[KVTransferParams]:
    return blocks is not None and blocks.kv_layout is not None


def _can_go_on(router: Router, turn: Turn) -> bool:
    try:
        plan_turn(router, turn)
    except APIError:
        return False
    return True


def _stale(router: Router, prefilled: Prefilled) -> bool:
    age = asyncio.get_running_loop().time() - prefilled.answered_at
    return age > router.config.dispatch_deadline


def _model(router: Router, body: dict[str, Any]) -> str:
    model = body.get("model")
    if isinstance(model, str):
        return model
    if model is not None:
        raise bad_request("A string expected.", param="model")
    served = router.pool.models()
    if len(served) > 1:
        raise bad_request("Several models are served here; say which one.", param="model")
    return next(iter(served), "")


def _answer_headers(turn: Turn, stream: Stream) -> CIMultiDict[str]:
    passed = headers.back(stream.headers)
    if turn.explain:
        passed["X-Backhaul-Explain"] = turn.report.explain()
    return passed


async def _begin(
    request: web.Request, response: web.StreamResponse, turn: Turn, stream: Stream, answer: Answer
) -> None:
    turn.report.see_first_byte()
    if turn.report.prompt_tokens is None and answer.prompt_token_ids:
        turn.report.prompt_tokens = len(answer.prompt_token_ids)
    response.headers.extend(_answer_headers(turn, stream))
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    await response.prepare(request)


async def _send(request: web.Request, response: web.StreamResponse, turn: Turn, data: bytes) -> None:
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


def _packed(token_ids: Sequence[int] | None) -> bytes:
    try:
        return pack_ids(token_ids or ())
    except (TypeError, OverflowError):
        return b""

"""`/inference/v1/abort_requests`: a client ends requests of its own, by their ids."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from connectors.wire.openai import APIError, bad_request
from router import jsontext
from router.body import read_object
from router.context import Request, Router
from router.request import Turn, tenant_of
from router.siblings import Answer

ABORT: Final = "abort"
MAX_REQUEST_IDS: Final = 8192
MAX_CHARS: Final = 160
"""Of what may be an id: that of a request, and what an answer's has before it."""


async def abort_requests(router: Router, request: Request) -> web.Response:
    """Their answers end with the finish reason "abort" where the engine can say so, else with an error. Ids that are
    not this client's, or whose requests have ended, are passed over."""
    names = (await read_object(request, router.config.max_body_bytes)).get("request_ids")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_request("A list of request ids expected.", param="request_ids")
    if len(names) > MAX_REQUEST_IDS:
        raise bad_request(f"At most {MAX_REQUEST_IDS} ids are possible.", param="request_ids")
    tenant = tenant_of(router, request.headers)
    asked = jsontext.dumps([tenant, [name for name in names if len(name) <= MAX_CHARS]])
    numbers = [jsontext.loads(answer) for answer in await router.siblings.gather(ABORT, asked)]
    return web.json_response({"aborted": sum(numbers)})


def answers(router: Router) -> Answer:
    """What each process of the router does about it: the turns that it serves."""

    async def answer(body: bytes) -> bytes:
        tenant, names = jsontext.loads(body)
        return jsontext.dumps(await _abort_all(router, tenant, names))

    return answer


async def _abort_all(router: Router, tenant: str, names: list[str]) -> int:
    """How many there were."""
    found = {id(turn): turn for name in set(names) for turn in router.running.find(tenant, name)}
    turns = [turn for turn in found.values() if not turn.answered]
    # Each once, even if who asked for it leaves: a turn that is cancelled twice cannot tell its client why it ends.
    work = [router.background.start(_abort(router, turn)) for turn in turns if not turn.aborted]
    for turn in turns:
        turn.aborted = True  # whatever comes next in it does not begin
    if work:
        await asyncio.wait(work)
    return len(turns)


async def _abort(router: Router, turn: Turn) -> None:
    engine = turn.engine
    if engine is not None and engine.role == "decode" and engine.is_ours(turn.model):
        try:
            if await router.upstream.abort(engine, turn.name):
                return
        except APIError:
            pass
    if not turn.answered:
        turn.task.cancel()

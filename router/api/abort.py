"""`/inference/v1/abort_requests`: a client ends requests of its own, by their ids."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from connectors.wire.openai import APIError, bad_request
from router.body import read_object
from router.context import ROUTER, Router
from router.request import Turn, tenant_of

MAX_REQUEST_IDS: Final = 8192


async def abort_requests(request: web.Request) -> web.Response:
    """Their answers end with the finish reason "abort" where the engine can say so, else with an error. Ids that are
    not this client's, or whose requests have ended, are passed over."""
    router = request.app[ROUTER]
    names = (await read_object(request, router.config.max_body_bytes)).get("request_ids")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_request("A list of request ids expected.", param="request_ids")
    if len(names) > MAX_REQUEST_IDS:
        raise bad_request(f"At most {MAX_REQUEST_IDS} ids are possible.", param="request_ids")
    tenant = tenant_of(router, request)
    turns = {id(turn): turn for name in set(names) for turn in router.running.find(tenant, name)}
    await asyncio.gather(*(_abort(router, turn) for turn in turns.values()))
    return web.json_response({"aborted": len(turns)})


async def _abort(router: Router, turn: Turn) -> None:
    turn.aborted = True  # whatever comes next in this turn does not begin
    engine = turn.engine
    if engine is not None and engine.role == "decode" and engine.is_ours(turn.model):
        try:
            if await router.upstream.abort(engine, turn.report.request_id):
                return
        except APIError:
            pass
    turn.task.cancel()

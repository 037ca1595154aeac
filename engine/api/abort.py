"""POST /inference/v1/abort_requests: end running requests by the ids their clients know."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from pydantic import Field, field_validator

from connectors.wire.seal import SEAL_HEADER, SealError
from engine.api.bodies.base import Body, at_most, parse
from engine.api.call import read_json
from engine.api.context import WORKER
from engine.api.generation import json_response
from engine.api.transfer import forbidden

MAX_REQUEST_IDS = 8192


class AbortBody(Body):
    request_ids: Annotated[list[str], Field(fail_fast=True)]

    @field_validator("request_ids", mode="before")
    @classmethod
    def _request_ids(cls, value: object) -> object:
        return at_most(MAX_REQUEST_IDS, value, "ids")


async def abort(request: web.Request) -> web.Response:
    """Their own answers end with the finish reason "abort"; how many there were is answered here. Unknown ids, and
    those of requests that have ended, are passed over. An engine with a seal key takes this from its holders only."""
    serving = request.app[WORKER].require_serving()
    if serving.seals is not None:
        try:
            serving.seals.check(request.headers.get(SEAL_HEADER), request.path, {})
        except SealError as error:
            raise forbidden("request_ids", str(error)) from None
    body = parse(AbortBody, await read_json(request))
    return json_response({"aborted": serving.client.abort(frozenset(body.request_ids))})

"""/kv/… and /ec/…: what engines ask of each other, about KV and about encodings of pictures. Answered from the lease
table, without waiting for an engine step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from aiohttp import web
from pydantic import Field

from connectors.lease import ClaimRefused
from connectors.transport import LeaseReleased, TransferEvent
from connectors.wire.openai import APIError
from engine.api.bodies.base import Body, parse
from engine.api.call import read_json
from engine.api.context import WORKER, ECSide, KVSide
from engine.api.generation import json_response
from engine.messages import EncoderTransfer

Tell = Callable[[TransferEvent], None]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class LeaseBody(Body):
    engine_id: Name
    request_id: Name


class ClaimBody(LeaseBody):
    reader: str | None = None
    """Who is going to read; for logs only."""


class ReleaseBody(LeaseBody):
    claim_id: Name | None = None
    """Of the reader that gives back a claim it does not use."""


class RenewBody(Body):
    engine_id: Name
    request_ids: Annotated[list[Name], Field(max_length=65536, fail_fast=True)]


async def agent(request: web.Request) -> web.Response:
    """Who this engine is and how to reach its memory."""
    side, _ = _side(request)
    return json_response(side.transport.agent_info())


async def claim(request: web.Request) -> web.Response:
    """Leave to read a finished request's blocks, for a while."""
    body = parse(ClaimBody, await read_json(request))
    side, tell = _side(request, body.engine_id)
    answer = side.leases.claim(body.request_id)
    if isinstance(answer, ClaimRefused):
        raise APIError(
            410,
            f"the blocks of this request cannot be read: their lease is {answer.reason}",
            type="LeaseError",
            param="request_id",
            code=f"lease_{answer.reason}",
        )
    if request.transport is None or request.transport.is_closing():
        # Its sender has given up, and would not give it back.
        if side.leases.cancel(body.request_id, answer.claim_id):
            tell(LeaseReleased(body.request_id))
        raise ConnectionResetError("the reader has left")
    return json_response(
        {
            "valid_for": answer.valid_for,
            "block_ids": answer.block_ids,
            "block_hashes": answer.block_hashes,
            "claim_id": answer.claim_id,
        }
    )


async def renew(request: web.Request) -> web.Response:
    """Heartbeat of a reader that still queues."""
    body = parse(RenewBody, await read_json(request))
    side, _ = _side(request, body.engine_id)
    return json_response({"renewed": side.leases.renew(body.request_ids)})


async def release(request: web.Request) -> web.Response:
    """Nobody will read these blocks."""
    body = parse(ReleaseBody, await read_json(request))
    side, tell = _side(request, body.engine_id)
    released = side.leases.cancel(body.request_id, body.claim_id)
    if released:
        tell(LeaseReleased(body.request_id))
    return json_response({"released": released})


def _side(request: web.Request, engine_id: str | None = None) -> tuple[KVSide | ECSide, Tell]:
    """What is asked about, and how the engine's loop is told. Also while draining: readers of what is held here must be
    able to finish."""
    serving = request.app[WORKER].require_serving()
    of_encodings = request.path.startswith("/ec/")
    side = serving.ec if of_encodings else serving.kv
    if side is None:
        what = "an encoder-cache" if of_encodings else "a KV"
        raise APIError(404, f"this engine runs without {what} connector", type="NotFoundError")
    if engine_id not in (None, side.engine_id):
        raise APIError(
            409,
            f"this is engine {side.engine_id}, not {engine_id}; it was restarted, or the address is wrong",
            type="ConflictError",
            param="engine_id",
            code="engine_mismatch",
        )

    def tell(event: TransferEvent) -> None:
        serving.inbox.put(EncoderTransfer(event) if of_encodings else event)

    return side, tell

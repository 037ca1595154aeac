"""One API call as it comes in: its body, and the blocks another engine holds for it.

Whoever reads a body that names remote blocks owes their owner a release until the engine has taken the request over.
`settle_debt` pays what is left when a handler ends, so that no rejection, early or late, leaves blocks pinned.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web

from connectors.transport import Peer
from connectors.wire.note import LEG_HEADER
from connectors.wire.openai import APIError, bad_request
from connectors.wire.transfer import ECTransferParams, KVTransferParams, WireError
from engine.api.bodies.media import shows_pictures
from engine.api.context import WORKER, Serving
from engine.api.offload import LARGE_BODY, offload
from engine.api.transfer import EC, KV, check_extra_args, read_transfer, trusted_params, without_prompt_ids

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
_DEBT = web.RequestKey("debt", object)
"""The raw kv_transfer_params of a body whose request the engine has not taken over."""
_OWNER_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_SIZE = web.RequestKey("size", int)
MAX_REQUEST_ID_LENGTH = 128
MAX_DEPTH = 128
"""Arrays and objects within each other. What reads or writes JSON gives up somewhere beyond, each in its own way."""

MAX_BRACKETS = 1 << 19
"""Opening ones, those in strings too: far more than any prompt has. Parsing each costs the interpreter lock."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request for generation that may proceed."""

    http: web.Request
    serving: Serving
    body: dict[str, Any]
    request_id: str
    """The client's X-Request-Id, or one made up."""
    extra_args: Mapping[str, object]
    """For the engine: the transfer params, parsed and never with prompt_token_ids, and what else came with them."""
    prompt_token_ids: list[int] | None
    """Ids that the router knows for this prompt, in the vocabulary; only as part of a hand-off or an offer, and of text
    only."""

    @property
    def names(self) -> tuple[str, ...]:
        """What this request can be aborted by: the client's id, and the router's name for the leg."""
        leg = self.http.headers.get(LEG_HEADER, "")
        return (self.request_id, leg) if 0 < len(leg) <= MAX_REQUEST_ID_LENGTH else (self.request_id,)

    def engine_id(self, prefix: str, index: int = 0) -> str:
        """A request id no other request of this engine has, even if a client repeats its own."""
        return f"{prefix}-{self.request_id}-{index}-{uuid.uuid4().hex[:8]}"

    @property
    def part_of_handoff(self) -> bool:
        """Whether another engine has computed the prompt, or goes on with it."""
        params = self.kv_transfer_params
        return params is not None and bool(params.do_remote_prefill or params.do_remote_decode)

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        params = self.extra_args.get(KV)
        return params if isinstance(params, KVTransferParams) else None

    @property
    def ec_transfer_params(self) -> ECTransferParams | None:
        params = self.extra_args.get(EC)
        return params if isinstance(params, ECTransferParams) else None

    def without_offer(self) -> Call:
        """For what has no one prompt and one answer whose blocks could be offered."""
        if self.part_of_handoff:
            return self
        return replace(self, extra_args={name: value for name, value in self.extra_args.items() if name != KV})

    @property
    def large(self) -> bool:
        """Whether work on the body belongs in a thread."""
        return is_large(self.http)

    def hand_over(self) -> None:
        """The engine has the request: its connector sees to the remote blocks from here on."""
        self.http[_DEBT] = None


async def read_call(request: web.Request) -> Call:
    """Read and check what all generating endpoints share. Raises APIError."""
    body = await read_json(request)
    worker = request.app[WORKER]
    serving = worker.require_serving()
    raw = trusted_params(request, body, serving)
    request[_DEBT] = raw.get(KV)
    check_extra_args(body)
    adopt_request_id(request, body)
    worker.require_accepting()
    serving.client.check_room()
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_request("model: a string expected", param="model")
    serving.check_model(model)
    may_offer = serving.kv is not None and worker.config.role != "prefill"
    # What is echoed is what the client sent; and placeholders look the same whatever the picture is.
    if body.get("echo") is True or shows_pictures(body):
        raw = without_prompt_ids(raw)
    transfer = await offload(is_large(request), read_transfer, raw, serving, may_offer=may_offer)
    return Call(request, serving, body, request[REQUEST_ID], transfer.extra_args, transfer.prompt_token_ids)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as an object. Raises APIError 400 for anything else."""
    try:
        raw = await request.read()
    except web.RequestPayloadError:
        encoding = request.headers.get("Content-Encoding", "identity")
        error = bad_request(f"the body is not what its Content-Encoding ({encoding[:20]}) says")
        error.headers["Connection"] = "close"  # what is left of it cannot be read, so no request can follow
        raise error from None
    request[_SIZE] = len(raw)
    return await offload(is_large(request), _load, raw)


def is_large(request: web.Request) -> bool:
    """Whether work on the body, once read, belongs in a thread."""
    return request[_SIZE] >= LARGE_BODY


def _load(raw: bytes) -> dict[str, Any]:
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > MAX_BRACKETS:
        raise bad_request(f"the body has {brackets} opening brackets, at most {MAX_BRACKETS} are possible")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, not {_json_type(body)}")
    if brackets > MAX_DEPTH:  # most bodies have fewer, so their depth needs no look
        _check_depth(body)
    return body


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for outer in level
            for value in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(value, dict | list)
        ]
        if not level:
            return
    raise bad_request(f"the body is nested more than {MAX_DEPTH} deep")


def request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _is_request_id(given) else uuid.uuid4().hex


def adopt_request_id(request: web.Request, body: Mapping[str, Any]) -> None:
    """A body may name its request; the header counts before it. Raises APIError 400."""
    given = body.get("request_id")
    if given is None:
        return
    if not isinstance(given, str) or not _is_request_id(given):
        raise bad_request(
            f"request_id: 1 to {MAX_REQUEST_ID_LENGTH} printable ASCII characters expected", param="request_id"
        )
    if not _is_request_id(request.headers.get("X-Request-Id", "")):
        request[REQUEST_ID] = given


def _is_request_id(value: str) -> bool:
    return 0 < len(value) <= MAX_REQUEST_ID_LENGTH and value.isascii() and value.isprintable()


@web.middleware
async def settle_debt(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Release the remote blocks of a request that the engine never took over.

    Not if it is only this engine that cannot take it, now: a router offers them to another, or gives them back itself.
    """
    try:
        return await handler(request)
    except APIError as error:
        if error.status == 503 and LEG_HEADER in request.headers:
            request[_DEBT] = None
        raise
    finally:
        serving = request.app[WORKER].serving
        owner = _owner(request.get(_DEBT))
        if owner is not None and serving is not None and serving.kv is not None:
            serving.kv.transport.release(*owner)
            logger.info("released the blocks of a refused request", extra={"request_id": request[REQUEST_ID]})


def _owner(raw: object) -> tuple[Peer, str] | None:
    """Who holds the blocks these params name, and under which request id; read leniently, for they may be what
    the request was refused for."""
    if not isinstance(raw, dict) or raw.get("do_remote_prefill") is not True:
        return None
    groups = raw.get("remote_block_ids")
    if not groups or (isinstance(groups, list) and not any(groups)):
        return None
    try:
        params = KVTransferParams.parse({key: raw[key] for key in _OWNER_KEYS if key in raw})
    except WireError:
        return None
    engine_id, request_id, host, port = (getattr(params, key) for key in _OWNER_KEYS)
    return (Peer(engine_id, host, port), request_id) if engine_id and request_id and host and port else None


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean"}.get(type(value), "a number")

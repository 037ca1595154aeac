"""GET /openapi.json: the router's API. Of bodies it declares what the router itself reads; the rest is the engines'."""

from __future__ import annotations

from functools import cache
from typing import Final

from aiohttp import web

from connectors.wire.openapi import OBJECT, PATH, Json, Operation, document, kind
from router import jsontext
from router.admin import STATUS_PATH
from router.api import passthrough
from router.api.abort import MAX_REQUEST_IDS
from router.context import Request, Router
from router.upstream import ABORT_PATH

_ANYTHING: Final[Json] = {}
_CONVERSATION: Final[Json] = {
    "name": "X-Conversation-Id",
    "in": "header",
    "description": "Names the conversation this turn belongs to.",
    "schema": {"type": "string"},
}
_EXPLAIN: Final[Json] = {
    "name": "X-Backhaul-Explain",
    "in": "header",
    "description": "1: the answer's X-Backhaul-… headers tell how the turn went.",
    "schema": {"type": "string"},
}
_TURN: Final[Json] = {
    "model": {"type": ["string", "null"]},
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"]},
    "n": {"type": ["integer", "null"], "minimum": 1},
    "cache_salt": {"type": ["string", "null"]},
    "conversation_id": {"type": ["string", "null"]},
    "return_token_ids": {"type": ["boolean", "null"]},
}
_MODEL: Final[Json] = {"model": _TURN["model"]}
_MESSAGES: Final[Json] = {"messages": {"type": "array", "items": OBJECT}}
_PROMPT: Final[Json] = {"prompt": {"type": ["string", "array"]}}
_INPUT: Final[Json] = {"input": {"type": ["string", "array"]}}
_IDS: Final[Json] = {"token_ids": {"type": "array", "items": {"type": "integer"}}}
_REQUEST_IDS: Final[Json] = {"request_ids": {"type": "array", "items": {"type": "string"}, "maxItems": MAX_REQUEST_IDS}}


def _body(required: Json, optional: Json) -> Json:
    fields = {**required, **optional}
    return {"type": "object", "required": list(required), "properties": fields, "additionalProperties": True}


def _turn(path: str, summary: str, prompt: Json, answer: Json) -> Operation:
    headers = (_CONVERSATION, _EXPLAIN)
    return Operation("post", path, summary, _body(prompt, _TURN), answer, streams=True, parameters=headers)


def _passed(path: str) -> Operation:
    return Operation("post", path, "Answered by one engine.", _body({}, _MODEL), _ANYTHING)


OPERATIONS: Final = (
    _turn("/v1/chat/completions", "Answer a chat.", _MESSAGES, kind("chat.completion")),
    _turn("/v1/completions", "Go on from a text.", _PROMPT, kind("text_completion")),
    _turn("/v1/responses", "Answer input items.", _INPUT, kind("response")),
    _turn("/inference/v1/generate", "Answer token ids with token ids.", _IDS, OBJECT),
    Operation("post", ABORT_PATH, "End running requests of one's own.", _body(_REQUEST_IDS, {}), OBJECT),
    *map(_passed, passthrough.POSTS),
    Operation("get", "/v1/models", "The models the engines serve.", answer=kind("list")),
    Operation("get", "/v1/models/{model}", "One model.", answer=kind("model")),
    Operation("get", "/version", "Answered by one engine.", answer=OBJECT),
    Operation("get", "/tokenizer_info", "Answered by one engine, if it can.", answer=OBJECT),
    Operation("get", "/v1/{rest}", "Answered by one engine, if it can.", answer=_ANYTHING),
    Operation("get", "/ping", "200 while the process lives.", answer=OBJECT),
    Operation("get", "/health", "200 while the process lives.", answer=OBJECT),
    Operation("get", "/ready", "Whether new requests should come here.", answer=OBJECT, unready=OBJECT),
    Operation("get", "/metrics", "Prometheus metrics."),
    Operation("get", STATUS_PATH, "The engines, what they can do, and what is done without.", answer=OBJECT),
    Operation("get", PATH, "This document.", answer=OBJECT),
)


async def openapi(_: Router, __: Request) -> web.Response:
    return web.Response(body=_document(), content_type="application/json")


@cache
def _document() -> bytes:
    return jsontext.dumps(document("Backhaul router", OPERATIONS, {}))

"""GET /openapi.json: the engine's API, declared from the models its bodies are read with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import orjson
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from connectors.wire.openapi import OBJECT, PATH, Json, Operation, document, kind
from engine.api.abort import AbortBody
from engine.api.bodies.chat import ChatBody
from engine.api.bodies.completion import CompletionBody
from engine.api.bodies.derender import DerenderChatBody, DerenderCompletionBody
from engine.api.bodies.generate import GenerateBody
from engine.api.bodies.responses import ResponsesBody
from engine.api.bodies.tokenize import DetokenizeBody, TokenizeChat, TokenizeResponses, TokenizeText
from engine.api.kv import ClaimBody, ReleaseBody, RenewBody


@dataclass(frozen=True, slots=True)
class Declared:
    """A route, with the model of its body, or the models one of which its body is."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: type[BaseModel] | tuple[type[BaseModel], ...] = ()
    answer: Json | None = None
    streams: bool = False


_LIST: Json = {"type": "array", "items": OBJECT}

ROUTES = (
    Declared("post", "/v1/chat/completions", "Answer a chat.", ChatBody, kind("chat.completion"), streams=True),
    Declared("post", "/v1/completions", "Go on from a text.", CompletionBody, kind("text_completion"), streams=True),
    Declared("post", "/v1/responses", "Answer input items.", ResponsesBody, kind("response"), streams=True),
    Declared("get", "/v1/responses/{id}", "404: no responses are stored."),
    Declared("delete", "/v1/responses/{id}", "404: no responses are stored."),
    Declared("get", "/v1/responses/{id}/input_items", "404: no responses are stored."),
    Declared("post", "/v1/responses/{id}/cancel", "404: no responses are stored."),
    Declared("post", "/inference/v1/generate", "Answer token ids with token ids.", GenerateBody, OBJECT, streams=True),
    Declared("post", "/inference/v1/abort_requests", "End running requests.", AbortBody, OBJECT),
    Declared("post", "/v1/chat/completions/render", "The body to generate from.", ChatBody, OBJECT),
    Declared("post", "/v1/completions/render", "The bodies to generate from.", CompletionBody, _LIST),
    Declared("post", "/v1/responses/render", "The body to generate from.", ResponsesBody, OBJECT),
    Declared(
        "post",
        "/v1/chat/completions/derender",
        "What was generated, as the chat's answer.",
        DerenderChatBody,
        kind("chat.completion"),
    ),
    Declared(
        "post",
        "/v1/completions/derender",
        "What was generated, as the completion.",
        DerenderCompletionBody,
        kind("text_completion"),
    ),
    Declared("post", "/tokenize", "The ids of a prompt.", (TokenizeText, TokenizeChat, TokenizeResponses), OBJECT),
    Declared("post", "/detokenize", "The text of ids.", DetokenizeBody, OBJECT),
    Declared("get", "/v1/models", "The models served here.", answer=kind("list")),
    Declared("get", "/v1/models/{name}", "One model.", answer=kind("model")),
    Declared("get", "/health", "200 while requests are served, 503 otherwise."),
    Declared("get", "/ping", "The same."),
    Declared("post", "/ping", "The same."),
    Declared("get", "/version", "The engine's version.", answer=OBJECT),
    Declared("get", "/metrics", "Prometheus metrics."),
    Declared("get", PATH, "This document.", answer=OBJECT),
    Declared("get", "/kv/agent", "For engines: how to reach this one's memory.", answer=OBJECT),
    Declared("post", "/kv/claim", "For engines: leave to read blocks.", ClaimBody, OBJECT),
    Declared("post", "/kv/renew", "For engines: still interested in blocks.", RenewBody, OBJECT),
    Declared("post", "/kv/release", "For engines: no more interested in blocks.", ReleaseBody, OBJECT),
    Declared("get", "/ec/agent", "For engines: how to reach this one's encodings.", answer=OBJECT),
    Declared("post", "/ec/claim", "For engines: leave to read an encoding.", ClaimBody, OBJECT),
    Declared("post", "/ec/renew", "For engines: still interested in encodings.", RenewBody, OBJECT),
    Declared("post", "/ec/release", "For engines: no more interested in encodings.", ReleaseBody, OBJECT),
)


async def openapi(_: web.Request) -> web.Response:
    return web.Response(body=_document(), content_type="application/json")


@cache
def _document() -> bytes:
    models = {model for route in ROUTES for model in _models(route)}
    named, shared = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )

    def schema(route: Declared) -> Json | None:
        bodies = [named[model, "validation"] for model in _models(route)]
        return {"anyOf": bodies} if len(bodies) > 1 else next(iter(bodies), None)

    operations = [
        Operation(
            route.method, route.path, route.summary, body=schema(route), answer=route.answer, streams=route.streams
        )
        for route in ROUTES
    ]
    return orjson.dumps(document("Backhaul engine", operations, shared["$defs"]))


def _models(route: Declared) -> tuple[type[BaseModel], ...]:
    return route.body if isinstance(route.body, tuple) else (route.body,)

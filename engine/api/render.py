"""POST /v1/…/render: the body for /inference/v1/generate that asks for what a chat or completions body does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from connectors.wire.openai import bad_request
from connectors.wire.transfer import ECTransferParams, WireError
from engine.api import completions as completions_api
from engine.api import media
from engine.api import responses as responses_api
from engine.api.bodies.chat import parse_chat
from engine.api.bodies.generate import CONTEXT
from engine.api.bodies.sampling import SamplingBody
from engine.api.bodies.structured import StructuredBody
from engine.api.call import REQUEST_ID, adopt_request_id, is_large, read_json
from engine.api.chat import grammar
from engine.api.chat import render as render_chat
from engine.api.context import WORKER, Serving
from engine.api.generation import Json, json_response
from engine.api.media import Named
from engine.api.offload import offload
from engine.api.responses_input import pictures_of
from engine.api.transfer import EC, KV, check_extra_args, trusted_params, without_prompt_ids
from engine.grammar import GrammarSpec
from engine.media.placement import Picture

_BESIDE = ("model", "stream", "stream_options", "return_token_ids", "cache_salt", "priority")
_ELSEWHERE = {"priority", *StructuredBody.model_fields}
"""Sampling fields that do not stand among the sampling parameters as they are."""
_STRUCTURED = {"json_schema": "json", "regex": "regex", "choice": "choice", "lark": "grammar"}


@dataclass(frozen=True, slots=True)
class _Source:
    """A body to be rendered, as it came."""

    serving: Serving
    raw: Json
    params: Json
    """Its transfer params."""
    extra_args: Json
    """What else the request carries for whoever generates."""

    @property
    def named(self) -> Named:
        """Raises APIError 400 for params that cannot be read."""
        if self.params.get(EC) is None:
            return Named(None)
        try:
            return Named(ECTransferParams.parse(self.params[EC]))
        except WireError as error:
            raise bad_request(str(error), param=error.param) from None


async def chat(request: web.Request) -> web.Response:
    source = await _read(request)
    serving, large = source.serving, is_large(request)
    body = await offload(large, parse_chat, source.raw)
    pictures = await media.prepare(serving, body, body.pictures, source.named, param="messages")
    special = bool(body.add_special_tokens)
    ids = await render_chat(serving, body, pictures, add_special_tokens=special, large=large)
    constraint = await offload(large, grammar, serving, body, serving.check_prompt(ids, "messages"))
    rendered = _rendered(source, body, constraint, ids, f"chatcmpl-{request[REQUEST_ID]}")
    rendered |= _features(serving, ids, pictures, "messages")
    context = {name: source.raw[name] for name in CONTEXT if source.raw.get(name) is not None}
    return json_response(_for_format(serving, body, rendered, context))


async def completions(request: web.Request) -> web.Response:
    """A list, with one body for each prompt."""
    source = await _read(request)
    body = await completions_api.read_body(source.serving, source.raw, large=is_large(request))
    prompts = await completions_api.prompt_ids(source.serving, body)
    name = f"cmpl-{request[REQUEST_ID]}"
    constraint = body.grammar_spec
    return json_response([_rendered(source, body, constraint, ids, f"{name}-{i}") for i, ids in enumerate(prompts)])


async def responses(request: web.Request) -> web.Response:
    source = await _read(request)
    serving, large = source.serving, is_large(request)
    body, prompt = await offload(large, responses_api.read, source.raw)
    pictures = await media.prepare(serving, body, pictures_of(body), source.named, param="input")
    ids = serving.check_prompt(await responses_api.render(serving, prompt, pictures, large=large), "input")
    constraint = await offload(large, responses_api.grammar, serving, body, prompt, ids)
    context: Json = {"parallel_tool_calls": body.parallel}
    if prompt.tools:
        named = {"type": "function", "function": {"name": body.choice.removeprefix("=")}}
        context |= {"tools": prompt.tools, "tool_choice": named if body.choice.startswith("=") else body.choice}
    rendered = _rendered(source, body, constraint, ids, f"resp_{request[REQUEST_ID]}")
    rendered |= _features(serving, ids, pictures, "input")
    return json_response(_for_format(serving, body, rendered, context))


async def _read(request: web.Request) -> _Source:
    """Transfer params are for whoever generates: nothing is done about them here, but they pass only where they would
    be taken, and without the ids of a prompt, which are the answer's own."""
    raw = await read_json(request)
    serving = request.app[WORKER].require_serving()
    extra = dict(without_prompt_ids(trusted_params(request, raw, serving)))
    check_extra_args(raw)
    adopt_request_id(request, raw)
    if isinstance(raw.get("model"), str):
        serving.check_model(raw["model"])
    params = {name: value for name in (KV, EC) if (value := extra.pop(name, None)) is not None}
    return _Source(serving, raw, params, extra)


def _features(serving: Serving, ids: list[int], pictures: Sequence[Picture], param: str) -> Json:
    """What the ids do not tell of the pictures; nothing of a prompt without."""
    placed = media.placed(serving, ids, pictures, param)
    return {"features": media.features(placed)} if placed else {}


def _for_format(serving: Serving, body: SamplingBody, rendered: Json, context: Json) -> Json:
    """With what the model's format needs for an answer to end where it should and to be read."""
    if serving.chat.stop_token_ids:
        stops = serving.chat.stop_token_ids.union(body.stop_token_ids or ())
        rendered["sampling_params"]["stop_token_ids"] = sorted(stops)
    return rendered | {"parse_context": context}


def _rendered(
    source: _Source, body: SamplingBody, constraint: GrammarSpec | None, token_ids: list[int], request_id: str
) -> Json:
    raw = source.raw
    beside = {name: raw[name] for name in _BESIDE if raw.get(name) is not None}
    sampling = _sampling_params(raw, body, constraint)
    if source.extra_args:
        sampling["extra_args"] = source.extra_args
    return {"request_id": request_id, "token_ids": token_ids, "sampling_params": sampling, **beside, **source.params}


def _sampling_params(raw: Json, body: SamplingBody, constraint: GrammarSpec | None) -> Json:
    told: Json = {
        name: raw[name] for name in SamplingBody.model_fields if raw.get(name) is not None and name not in _ELSEWHERE
    }
    counts = {
        "max_tokens": body.requested_max_tokens,
        "logprobs": body.num_logprobs,
        "prompt_logprobs": body.num_prompt_logprobs,
    }
    told |= {name: count for name, count in counts.items() if count is not None}
    if constraint is not None:
        told["structured_outputs"] = _structured(constraint)
    return told


def _structured(constraint: GrammarSpec) -> dict[str, Any]:
    kind, source = constraint.kind, constraint.source
    if kind == "json_object":
        return {"json_object": True}
    return {_STRUCTURED[kind]: orjson.loads(source) if kind == "choice" else source}

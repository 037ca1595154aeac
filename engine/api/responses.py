"""POST /v1/responses, stateless: nothing is stored, so every request brings its whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from engine.api import media, model_format
from engine.api.bodies.responses import ResponsesBody, not_stored, parse_responses
from engine.api.call import Call, read_call
from engine.api.context import Serving
from engine.api.generation import Generation
from engine.api.logprobs import logprob_json
from engine.api.media import Named
from engine.api.offload import offload
from engine.api.requests import make_requests
from engine.api.responses_answer import ResponseOutput
from engine.api.responses_input import pictures_of, prompt_of
from engine.api.responses_shape import ResponseShape
from engine.formats.base import Prompt
from engine.grammar import GrammarSpec
from engine.media.placement import Picture


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    body, prompt = await offload(call.large, read, call.body)
    named = Named(call.ec_transfer_params)
    pictures = await media.prepare(call.serving, body, pictures_of(body), named, param="input")
    ids = await _prompt_ids(call, prompt, pictures)
    requests = await make_requests(
        call,
        body,
        body,
        [ids],
        "resp",
        grammar=await offload(call.large, grammar, call.serving, body, prompt, ids),
        keep_special_tokens=call.serving.chat.keeps_special_tokens,
        stop_token_ids=call.serving.chat.stop_token_ids,
        media=media.placed(call.serving, ids, pictures, "input"),
    )
    return await Generation(call, body, requests, _shape(call, body, prompt, ids)).respond()


async def not_found(request: web.Request) -> web.StreamResponse:
    """Whatever is asked of a response that would have to be stored."""
    raise not_stored(request.match_info["id"])


def read(body: dict[str, Any]) -> tuple[ResponsesBody, Prompt]:
    """Raises APIError."""
    parsed = parse_responses(body)
    return parsed, prompt_of(parsed)


async def render(serving: Serving, prompt: Prompt, pictures: Sequence[Picture], *, large: bool) -> list[int]:
    """The ids of a prompt in the model's format. Raises APIError 400."""
    prompt = replace(prompt, pictures=media.in_prompt(pictures))
    return await model_format.render(serving, prompt, param="input", large=large)


def grammar(serving: Serving, body: ResponsesBody, prompt: Prompt, ids: list[int]) -> GrammarSpec | None:
    """Raises APIError 400."""
    param = "tool_choice" if prompt.tools else "text.format"
    return model_format.grammar(serving, body, prompt.tools, ids, param=param)


async def _prompt_ids(call: Call, prompt: Prompt, pictures: Sequence[Picture]) -> list[int]:
    ids = call.prompt_token_ids
    if ids is None:
        ids = await render(call.serving, prompt, pictures, large=call.large)
    return call.serving.check_prompt(ids, "input")


def _shape(call: Call, body: ResponsesBody, prompt: Prompt, ids: list[int]) -> ResponseShape:
    serving = call.serving
    parser = serving.chat.parser(tools=prompt.tools, choice=body.choice, prompt_token_ids=ids)
    return ResponseShape(
        f"resp_{call.request_id}",
        {"model": serving.model_name} | body.echo,
        ResponseOutput(parser, serving.tokenizer.token_bytes, parallel=body.parallel),
        partial(logprob_json, tokenizer=serving.tokenizer, count=body.top_logprobs or 0),
        bool(body.return_token_ids),
    )

"""POST /v1/responses, stateless: nothing is stored, so every request brings its whole conversation."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.bodies.responses import ResponsesBody, not_stored, parse_responses
from engine.api.call import Call, read_call
from engine.api.context import LONG_TEXT, Serving
from engine.api.generation import Generation, Json, make_requests
from engine.api.logprobs import finite
from engine.api.offload import offload
from engine.api.responses_answer import ResponseOutput
from engine.api.responses_input import prompt_of, text_size
from engine.api.responses_shape import ResponseShape
from engine.formats.base import FormatError, Prompt, PromptTooLong
from engine.grammar import GrammarSpec
from engine.logprobs import TokenLogprobs
from engine.request import Request
from engine.tokenizer import Tokenizer


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    body, prompt = await offload(call.large, read, call.body)
    engine_request = await _request(call, body, prompt)
    shape = _shape(call, body, prompt, engine_request)
    return await Generation(call, body, [[engine_request]], shape).respond()


async def not_found(request: web.Request) -> web.StreamResponse:
    """Whatever is asked of a response that would have to be stored."""
    raise not_stored(request.match_info["id"])


def read(body: dict[str, Any]) -> tuple[ResponsesBody, Prompt]:
    """Raises APIError."""
    parsed = parse_responses(body)
    return parsed, prompt_of(parsed)


async def _request(call: Call, body: ResponsesBody, prompt: Prompt) -> Request:
    serving = call.serving
    ids = call.prompt_token_ids
    if ids is None:
        ids = await render(serving, prompt, large=call.large)
    ids = serving.check_prompt(ids, "input")
    (request,) = await make_requests(
        call,
        body,
        body,
        ids,
        call.engine_id("resp"),
        grammar=grammar(serving, body, prompt, ids),
        keep_special_tokens=serving.chat.keeps_special_tokens,
        stop_token_ids=serving.chat.stop_token_ids,
    )
    return request


async def render(serving: Serving, prompt: Prompt, *, large: bool) -> list[int]:
    """The ids of a prompt in the model's format. Raises APIError 400."""
    return await offload(large or text_size(prompt) >= LONG_TEXT, _render, serving, prompt)


def _render(serving: Serving, prompt: Prompt) -> list[int]:
    try:
        return serving.chat.render(prompt)
    except PromptTooLong as error:
        raise serving.too_long(f"more than {error.at_least}", "input") from None
    except FormatError as error:
        raise bad_request(f"input: {error}", param="input") from None


def grammar(serving: Serving, body: ResponsesBody, prompt: Prompt, ids: list[int]) -> GrammarSpec | None:
    """What the answer must look like from its first token on. Raises APIError 400."""
    try:
        return serving.chat.grammar(
            body.grammar_spec,
            tools=prompt.tools,
            choice=body.choice,
            parallel=body.parallel,
            prompt_token_ids=ids,
        )
    except FormatError as error:
        param = "tool_choice" if prompt.tools else "text.format"
        raise bad_request(f"{param}: {error}", param=param) from None


def _shape(call: Call, body: ResponsesBody, prompt: Prompt, request: Request) -> ResponseShape:
    serving = call.serving
    parser = serving.chat.parser(tools=prompt.tools, choice=body.choice, prompt_token_ids=request.prompt_token_ids)
    return ResponseShape(
        f"resp_{call.request_id}",
        {"model": serving.model_name} | body.echo,
        ResponseOutput(parser, serving.tokenizer.token_bytes, parallel=body.parallel),
        partial(_logprob_json, serving.tokenizer, body.top_logprobs or 0),
        bool(body.return_token_ids),
    )


def _logprob_json(tokenizer: Tokenizer, count: int, item: TokenLogprobs) -> Json:
    def one(token_id: int, logprob: float) -> Json:
        token = tokenizer.token_bytes(token_id)
        return {"token": token.decode(errors="replace"), "bytes": list(token), "logprob": finite(logprob)}

    return one(item.token_id, item.logprob) | {"top_logprobs": [one(*other) for other in item.top[:count]]}

"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.bodies.chat import ChatBody, ChatPrompt, parse_chat
from engine.api.call import Call, read_call
from engine.api.chat_shape import ChatShape
from engine.api.context import LONG_TEXT, Serving
from engine.api.generation import Generation, make_requests
from engine.api.offload import offload
from engine.formats.base import FormatError, PromptTooLong
from engine.grammar import GrammarSpec


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    body = await offload(call.large, parse_chat, call.body)
    serving = call.serving
    prompt = serving.check_prompt(await _prompt_ids(call, body), "messages")
    requests = await make_requests(
        call,
        body,
        body,
        prompt,
        call.engine_id("chatcmpl"),
        grammar=await offload(call.large, grammar, serving, body, prompt),
        keep_special_tokens=serving.chat.keeps_special_tokens,
        stop_token_ids=serving.chat.stop_token_ids,
    )
    return await Generation(call, body, [requests], ChatShape(f"chatcmpl-{call.request_id}", serving, body)).respond()


async def render(serving: Serving, body: ChatPrompt, *, add_special_tokens: bool, large: bool) -> list[int]:
    """The ids of a conversation in the model's format. Raises APIError 400."""
    large = large or sum(len(message.text) for message in body.messages) >= LONG_TEXT
    return await offload(large, _render, serving, body, add_special_tokens)


def grammar(serving: Serving, body: ChatBody, prompt_token_ids: list[int]) -> GrammarSpec | None:
    """What the answer must look like from its first token on. Raises APIError 400."""
    try:
        return serving.chat.grammar(
            body.grammar_spec,
            tools=body.tools,
            choice=body.choice,
            parallel=body.parallel,
            prompt_token_ids=prompt_token_ids,
        )
    except FormatError as error:
        raise bad_request(f"tool_choice: {error}", param="tool_choice") from None


def _render(serving: Serving, body: ChatPrompt, add_special_tokens: bool) -> list[int]:
    prompt = body.prompt(add_special_tokens=add_special_tokens)
    try:
        return serving.chat.render(prompt)
    except PromptTooLong as error:
        raise serving.too_long(f"more than {error.at_least}", "messages") from None
    except FormatError as error:
        raise bad_request(f"messages: {error}", param="messages") from None


async def _prompt_ids(call: Call, body: ChatBody) -> list[int]:
    if call.prompt_token_ids is not None:
        return call.prompt_token_ids
    return await render(call.serving, body, add_special_tokens=bool(body.add_special_tokens), large=call.large)

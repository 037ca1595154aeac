"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from engine.api import media, model_format
from engine.api.bodies.chat import ChatBody, ChatPrompt, parse_chat
from engine.api.call import Call, read_call
from engine.api.chat_shape import ChatShape
from engine.api.context import Serving
from engine.api.generation import Generation
from engine.api.media import Named
from engine.api.offload import offload
from engine.api.requests import make_requests
from engine.grammar import GrammarSpec
from engine.media.placement import Picture


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    body = await offload(call.large, parse_chat, call.body)
    serving = call.serving
    pictures = await media.prepare(serving, body, body.pictures, Named(call.ec_transfer_params), param="messages")
    prompt = serving.check_prompt(await _prompt_ids(call, body, pictures), "messages")
    requests = await make_requests(
        call,
        body,
        body,
        [prompt],
        "chatcmpl",
        grammar=await offload(call.large, grammar, serving, body, prompt),
        keep_special_tokens=serving.chat.keeps_special_tokens,
        stop_token_ids=serving.chat.stop_token_ids,
        media=media.placed(serving, prompt, pictures, "messages"),
    )
    return await Generation(call, body, requests, ChatShape(f"chatcmpl-{call.request_id}", serving, body)).respond()


async def render(
    serving: Serving, body: ChatPrompt, pictures: Sequence[Picture], *, add_special_tokens: bool, large: bool
) -> list[int]:
    """The ids of a conversation in the model's format. Raises APIError 400."""
    prompt = await offload(large, body.prompt, add_special_tokens=add_special_tokens)
    prompt = replace(prompt, pictures=media.in_prompt(pictures))
    return await model_format.render(serving, prompt, param="messages", large=large)


def grammar(serving: Serving, body: ChatBody, prompt_token_ids: list[int]) -> GrammarSpec | None:
    """Raises APIError 400."""
    return model_format.grammar(serving, body, body.tools, prompt_token_ids, param="tool_choice")


async def _prompt_ids(call: Call, body: ChatBody, pictures: Sequence[Picture]) -> list[int]:
    if call.prompt_token_ids is not None:
        return call.prompt_token_ids
    return await render(
        call.serving, body, pictures, add_special_tokens=bool(body.add_special_tokens), large=call.large
    )

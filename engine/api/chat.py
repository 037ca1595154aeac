"""POST /v1/chat/completions."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.bodies.chat import ChatBody, ChatPrompt, parse_chat
from engine.api.call import Call, read_call
from engine.api.context import Serving
from engine.api.generation import DONE, Choice, Generation, Json, frame, make_requests
from engine.api.offload import offload
from engine.chat_template import ChatTemplateError
from engine.output import Delta
from engine.tokenizer import Tokenizer

_RESERVED = frozenset(inspect.signature(Tokenizer.render_chat).parameters) - {"variables"} | {"documents"}
"""What chat_template_kwargs cannot set: render_chat's own parameters, and fields of the body."""


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    body = await offload(call.large, parse_chat, call.body)
    prompt = call.serving.check_prompt(await _prompt_ids(call, body), "messages")
    requests = make_requests(call, body, body, prompt, call.engine_id("chatcmpl"))
    shape = ChatShape(f"chatcmpl-{call.request_id}", call.serving.model_name, bool(body.return_token_ids))
    return await Generation(call, body, [requests], shape).respond()


async def render(serving: Serving, body: ChatPrompt, *, add_special_tokens: bool, large: bool) -> list[int]:
    """The ids of a conversation under the chat template. Raises APIError 400."""
    text = await offload(large, _render, serving.tokenizer, body)
    return await serving.tokenize(text, add_special_tokens=add_special_tokens, param="messages")


def _render(tokenizer: Tokenizer, body: ChatPrompt) -> str:
    arguments = dict(body.chat_template_kwargs or {})
    if reserved := _RESERVED & arguments.keys():
        where = f"chat_template_kwargs.{min(reserved)}"
        raise bad_request(f"{where}: cannot be set there", param=where)
    if body.documents is not None:
        arguments["documents"] = body.documents
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
    try:
        return tokenizer.render_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            tools=body.tools,
            **arguments,
        )
    except ChatTemplateError as error:
        raise bad_request(f"messages: {error}", param="messages") from None


async def _prompt_ids(call: Call, body: ChatBody) -> list[int]:
    if call.prompt_token_ids is not None:
        return call.prompt_token_ids
    return await render(call.serving, body, add_special_tokens=bool(body.add_special_tokens), large=call.large)


@dataclass(frozen=True)
class ChatShape:
    id: str
    model: str
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = "chat"

    @property
    def end(self) -> bytes:
        return DONE

    def opening(self, choice: Choice) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        chunk = self._chunk([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])
        if self.return_token_ids:
            chunk["prompt_token_ids"] = choice.request.prompt_token_ids
            chunk["num_cached_tokens"] = choice.num_reused_tokens
        return [chunk]

    def events(self, choice: Choice, delta: Delta) -> list[Json]:
        if not (delta.text or choice.finish_reason or (self.return_token_ids and delta.token_ids)):
            return []
        entry: Json = {
            "index": choice.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            entry["stop_reason"] = choice.stop_reason
        if self.return_token_ids:
            entry["token_ids"] = delta.token_ids
        return [self._chunk([entry]) | choice.params_json]

    def closing(self, choices: Sequence[Choice], usage: Json, *, include_usage: bool) -> list[Json]:
        return [self._chunk([]) | {"usage": usage}] if include_usage else []

    def frame(self, event: Json) -> bytes:
        return frame(event)

    def error(self, body: Json) -> bytes:
        return frame(body)

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json:
        ids = {"prompt_token_ids": choices[0].request.prompt_token_ids} if self.return_token_ids else {}
        whole = {**self._head("chat.completion"), "choices": [self._entry(choice) for choice in choices]}
        return whole | {"usage": usage} | ids | choices[0].params_json

    def _entry(self, choice: Choice) -> Json:
        entry: Json = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.return_token_ids:
            entry["token_ids"] = choice.token_ids
        return entry

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": choices}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

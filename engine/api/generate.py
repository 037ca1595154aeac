"""POST /inference/v1/generate: ids of a prompt in, ids of answers out, without a template or a parser between.

Stop strings are matched in every output mode; the ids end with the token that completed one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from engine.api import media
from engine.api.bodies.chat import ChatBody
from engine.api.bodies.generate import GenerateBody, parse_context, parse_generate
from engine.api.call import read_call
from engine.api.chat_shape import ChatShape
from engine.api.context import Serving
from engine.api.generation import DONE, Choice, Generation, Json, frame
from engine.api.logprobs import logprobs_by_id, prompt_logprobs_json
from engine.api.media import Named
from engine.api.offload import offload
from engine.api.requests import make_requests
from engine.logprobs import TokenLogprobs
from engine.output import Delta

PREFIX = "generate-tokens"


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    serving = call.serving
    ids = call.body.get("token_ids")
    if isinstance(ids, list) and len(ids) >= serving.max_model_len:
        raise serving.too_long(str(len(ids)), "token_ids")
    body = await offload(call.large, parse_generate, call.body)
    prompt = serving.check_prompt(body.token_ids, "token_ids")
    pictures = media.known(serving, body.features, Named(call.ec_transfer_params))
    chat = None
    if body.output_mode == "derender":
        chat = await offload(call.large, parse_context, body.parse_context or {})
    requests = await make_requests(
        call,
        body,
        body.sampling,
        [prompt],
        PREFIX,
        keep_special_tokens=chat is not None and serving.chat.keeps_special_tokens,
        media=media.placed(serving, prompt, pictures, "features"),
    )
    return await Generation(call, body, requests, GenerateShape(call.request_id, serving, body, chat)).respond()


@dataclass
class GenerateShape:
    request_id: str
    serving: Serving
    body: GenerateBody
    chat: ChatBody | None
    """How the message is to be read, if there is to be one."""
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = "generate"
    _prompt_told: bool = False

    @property
    def id(self) -> str:
        return f"{PREFIX}-{self.request_id}"

    @property
    def end(self) -> bytes:
        return DONE

    def opening(self, choice: Choice) -> list[Json]:
        return []

    def events(self, choice: Choice, delta: Delta) -> list[Json]:
        if not (delta.token_ids or delta.text or choice.finish_reason):
            return []
        event = self._chunk([self._entry(choice, delta.token_ids, delta.text, delta.logprobs)])
        if not self._prompt_told:
            self._prompt_told = True
            event |= self._prompt(choice)
            if self.body.return_token_ids:
                event["num_cached_tokens"] = choice.num_reused_tokens
        return [event | choice.params_json]

    def closing(self, choices: Sequence[Choice], usage: Json, *, include_usage: bool) -> list[Json]:
        return [self._chunk([]) | {"usage": usage}] if include_usage else []

    def frame(self, event: Json) -> bytes:
        return frame(event)

    def error(self, body: Json) -> bytes:
        return frame(body)

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json:
        entries = [self._entry(choice, choice.token_ids, choice.text, choice.logprobs) for choice in choices]
        if self.chat is not None:
            told = ChatShape(self.id, self.serving, self.chat).answer(choices, usage)["choices"]
            for entry, read in zip(entries, told, strict=True):
                entry.update(message=read["message"], finish_reason=read["finish_reason"])
        head = {"model": self.serving.model_name, "created": self.created}
        whole = self._chunk(entries) | head | {"usage": usage}
        return whole | self._prompt(choices[0]) | choices[0].params_json

    def _chunk(self, entries: list[Json]) -> Json:
        return {"request_id": self.request_id, "output_mode": self.body.output_mode, "choices": entries}

    def _prompt(self, choice: Choice) -> Json:
        """What is told of the prompt, once."""
        told: Json = {}
        if self.body.return_token_ids:
            told["prompt_token_ids"] = choice.request.prompt_token_ids
            if choice.request.media:
                told["mm_placeholders"] = media.placeholders(choice.request.media)
        if choice.prompt_logprobs is not None:
            count = choice.request.sampling.prompt_logprobs or 0
            told["prompt_logprobs"] = prompt_logprobs_json(choice.prompt_logprobs, self.serving.tokenizer, count)
        return told

    def _entry(self, choice: Choice, token_ids: list[int], text: str, logprobs: Sequence[TokenLogprobs]) -> Json:
        asked = choice.request.sampling.logprobs is not None
        entry: Json = {
            "index": choice.index,
            "token_ids": token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": logprobs_by_id(logprobs) if asked else None,
        }
        if self.body.output_mode == "text":
            entry["text"] = text
        return entry

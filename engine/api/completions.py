"""POST /v1/completions; several prompts become several choices of one answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.bodies.completion import CompletionBody, parse_completion
from engine.api.call import read_call
from engine.api.context import LONG_TEXT, Serving
from engine.api.generation import DONE, Choice, Generation, Json, frame, make_requests
from engine.api.offload import offload
from engine.output import Delta

DEFAULT_MAX_TOKENS = 16


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    _check_sizes(call.serving, call.body.get("prompt"))
    body = await offload(call.large, parse_completion, call.body)
    if len(body.prompt) > 1:
        # One set of blocks cannot be the KV of two prompts.
        if call.part_of_handoff:
            raise bad_request("prompt: only one is possible with kv_transfer_params", param="prompt")
        call = call.without_offer()
    if body.max_tokens is None:
        body = body.model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
    prompts = await _prompt_ids(call.serving, body)
    groups = [make_requests(call, body, body, ids, call.engine_id("cmpl", i)) for i, ids in enumerate(prompts)]
    shape = CompletionShape(f"cmpl-{call.request_id}", call.serving.model_name, bool(body.return_token_ids))
    return await Generation(call, body, groups, shape).respond()


def _check_sizes(serving: Serving, prompt: object) -> None:
    """Refuse what is hopelessly much before each of its tokens is looked at. Raises APIError 400."""
    if not isinstance(prompt, list) or not prompt:
        return
    several = isinstance(prompt[0], str | list)
    if several and len(prompt) > serving.client.capacity:
        raise bad_request(f"prompt: at most {serving.client.capacity} at once", param="prompt")
    for ids in prompt if several else [prompt]:
        if isinstance(ids, list) and len(ids) >= serving.max_model_len:
            raise serving.too_long(str(len(ids)), "prompt")


async def _prompt_ids(serving: Serving, body: CompletionBody) -> list[list[int]]:
    """The ids of every prompt. Raises APIError 400."""
    special = body.add_special_tokens is not False

    def ids_of(prompt: str | list[int]) -> list[int]:
        ids = prompt if isinstance(prompt, list) else serving.encode(prompt, add_special_tokens=special, param="prompt")
        return serving.check_prompt(ids, "prompt")

    size = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
    return await offload(size >= LONG_TEXT, lambda: list(map(ids_of, body.prompt)))


@dataclass(frozen=True)
class CompletionShape:
    id: str
    model: str
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = "completions"

    @property
    def end(self) -> bytes:
        return DONE

    def opening(self, choice: Choice) -> list[Json]:
        return []

    def events(self, choice: Choice, delta: Delta) -> list[Json]:
        if not (delta.text or choice.finish_reason or (self.return_token_ids and delta.token_ids)):
            return []
        entry = self._entry(choice, delta.text)
        told: Json = {}
        if self.return_token_ids:
            entry["token_ids"] = delta.token_ids
            if not choice.opened:
                entry["prompt_token_ids"] = choice.request.prompt_token_ids
                told["num_cached_tokens"] = choice.num_reused_tokens
        return [{**self._head(), "choices": [entry]} | told | choice.params_json]

    def closing(self, choices: Sequence[Choice], usage: Json, *, include_usage: bool) -> list[Json]:
        return [{**self._head(), "choices": [], "usage": usage}] if include_usage else []

    def frame(self, event: Json) -> bytes:
        return frame(event)

    def error(self, body: Json) -> bytes:
        return frame(body)

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json:
        entries = []
        for choice in choices:
            entry = self._entry(choice, choice.text)
            if self.return_token_ids:
                entry["token_ids"] = choice.token_ids
                entry["prompt_token_ids"] = choice.request.prompt_token_ids
            entries.append(entry)
        return {**self._head(), "choices": entries, "usage": usage} | choices[0].params_json

    def _entry(self, choice: Choice, text: str) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _head(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

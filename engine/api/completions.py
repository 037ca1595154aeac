"""POST /v1/completions; several prompts, and several answers to each, become the choices of one answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.bodies.completion import CompletionBody, parse_completion
from engine.api.call import read_call
from engine.api.context import LONG_TEXT, Serving
from engine.api.generation import DONE, Choice, Generation, Json, frame
from engine.api.logprobs import TextLogprobs, prompt_logprobs_json
from engine.api.offload import offload
from engine.api.requests import make_requests
from engine.logprobs import TokenLogprobs
from engine.output import Delta


async def create(request: web.Request) -> web.StreamResponse:
    call = await read_call(request)
    body = await read_body(call.serving, call.body, large=call.large)
    if len(body.prompt) > 1:
        # One set of blocks cannot be the KV of two prompts.
        if call.part_of_handoff:
            raise bad_request("prompt: only one is possible with kv_transfer_params", param="prompt")
        call = call.without_offer()
    prompts = await prompt_ids(call.serving, body)
    groups = await make_requests(call, body, body, prompts, "cmpl")
    shape = CompletionShape(f"cmpl-{call.request_id}", call.serving, body)
    return await Generation(call, body, groups, shape).respond()


async def read_body(serving: Serving, body: Mapping[str, object], *, large: bool) -> CompletionBody:
    """Raises APIError 400."""
    _check_sizes(serving, body.get("prompt"))
    parsed = await offload(large, parse_completion, body)
    in_all = len(parsed.prompt) * parsed.num_choices
    if in_all > serving.client.capacity:
        raise bad_request(
            f"n: at most {serving.client.capacity} answers to all prompts together are possible, got {in_all}",
            param="n",
        )
    return parsed


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


async def prompt_ids(serving: Serving, body: CompletionBody) -> list[list[int]]:
    """The ids of every prompt. Raises APIError 400."""
    special = body.add_special_tokens is not False

    def ids_of(prompt: str | list[int]) -> list[int]:
        ids = prompt if isinstance(prompt, list) else serving.encode(prompt, add_special_tokens=special, param="prompt")
        return serving.check_prompt(ids, "prompt")

    size = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
    return await offload(size >= LONG_TEXT, lambda: list(map(ids_of, body.prompt)))


@dataclass
class CompletionShape:
    id: str
    serving: Serving
    body: CompletionBody
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = "completions"
    _logprobs: dict[int, TextLogprobs] = field(default_factory=dict)
    """By choice: each goes on from where its last chunk ended."""

    @property
    def end(self) -> bytes:
        return DONE

    def opening(self, choice: Choice) -> list[Json]:
        return []

    def events(self, choice: Choice, delta: Delta) -> list[Json]:
        tells_ids = self.body.return_token_ids or self.body.logprobs is not None
        if not (delta.text or choice.finish_reason or (tells_ids and delta.token_ids)):
            return []
        echoed = []
        if self.body.echo and not choice.opened:
            prompt = self._entry(choice, self._prompt(choice), self._logprobs_of_prompt(choice))
            echoed = [self._chunk([prompt | {"finish_reason": None, "stop_reason": None}])]
        entry = self._entry(choice, delta.text, self._logprobs_of_output(choice, delta.logprobs))
        if self.body.return_token_ids:
            entry["token_ids"] = delta.token_ids
        events = [*echoed, self._chunk([entry]) | choice.params_json]
        if not choice.opened:
            events[0]["choices"][0].update(self._prompt_fields(choice))
            events[0].update(self._reused(choice))
        return events

    def closing(self, choices: Sequence[Choice], usage: Json, *, include_usage: bool) -> list[Json]:
        return [self._chunk([]) | {"usage": usage}] if include_usage else []

    def frame(self, event: Json) -> bytes:
        return frame(event)

    def error(self, body: Json) -> bytes:
        return frame(body)

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json:
        if self.body.only_prompt:  # the engine's one token was nobody's wish
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return self._chunk(list(map(self._whole, choices))) | {"usage": usage} | choices[0].params_json

    def _whole(self, choice: Choice) -> Json:
        hidden = self.body.only_prompt
        text, ids, logprobs = ("", [], []) if hidden else (choice.text, choice.token_ids, choice.logprobs)
        lists = None
        if self.body.echo:
            text = self._prompt(choice) + text
            lists = self._logprobs_of_prompt(choice)
        of_output = self._logprobs_of_output(choice, logprobs)
        if lists is None:
            lists = of_output
        elif of_output is not None:
            lists = {name: values + of_output[name] for name, values in lists.items()}
        entry = self._entry(choice, text, lists) | self._prompt_fields(choice)
        if hidden:
            entry |= {"finish_reason": "length", "stop_reason": None}
        if self.body.return_token_ids:
            entry["token_ids"] = ids
        return entry

    def _prompt(self, choice: Choice) -> str:
        """The prompt's text: as it was given, or what its ids say."""
        given = self.body.prompt[choice.index // self.body.num_choices]
        if isinstance(given, str):
            return given
        return self.serving.tokenizer.decode(given, skip_special_tokens=choice.request.sampling.skip_special_tokens)

    def _prompt_fields(self, choice: Choice) -> Json:
        """What a choice tells of its prompt, once."""
        told: Json = {}
        if self.body.return_token_ids:
            told["prompt_token_ids"] = choice.request.prompt_token_ids
        count, items = self.body.prompt_logprobs, choice.prompt_logprobs
        if count is not None and items is not None:
            told["prompt_logprobs"] = prompt_logprobs_json(items, self.serving.tokenizer, count)
        return told

    def _reused(self, choice: Choice) -> Json:
        return {"num_cached_tokens": choice.num_reused_tokens} if self.body.return_token_ids else {}

    def _logprobs_of_prompt(self, choice: Choice) -> Json | None:
        writer = self._writer(choice)
        if writer is None or choice.prompt_logprobs is None:
            return None
        return writer.of_prompt(choice.request.prompt_token_ids, choice.prompt_logprobs)

    def _logprobs_of_output(self, choice: Choice, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        writer = self._writer(choice)
        return None if writer is None else writer.of_output(logprobs)

    def _writer(self, choice: Choice) -> TextLogprobs | None:
        count = self.body.logprobs
        if count is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        new = TextLogprobs(self.serving.tokenizer, count, as_ids=as_ids)
        return self._logprobs.setdefault(choice.index, new)

    def _entry(self, choice: Choice, text: str, logprobs: Json | None) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _chunk(self, entries: list[Json]) -> Json:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.serving.model_name}
        return {**head, "choices": entries}

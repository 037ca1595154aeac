"""POST /v1/…/derender: what was generated elsewhere, as the chat or completions endpoint would have told it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.bodies.chat import parse_chat
from engine.api.bodies.completion import CompletionBody, parse_completion
from engine.api.bodies.derender import (
    MAX_TOP,
    DerenderBody,
    DerenderChatBody,
    DerenderCompletionBody,
    Generated,
    parse_derender,
)
from engine.api.bodies.generate import parse_context
from engine.api.bodies.sampling import SamplingBody
from engine.api.call import REQUEST_ID, is_large, read_json
from engine.api.chat_shape import ChatShape
from engine.api.completions import CompletionShape
from engine.api.context import WORKER, Serving
from engine.api.generation import Choice, Json, json_response
from engine.api.offload import offload
from engine.api.replay import check_generated, passed_on, replay, usage_of
from engine.request import SamplingParams

B = TypeVar("B", bound=DerenderBody)


async def chat(request: web.Request) -> web.Response:
    return await _derender(request, DerenderChatBody, _chat)


async def completions(request: web.Request) -> web.Response:
    return await _derender(request, DerenderCompletionBody, _completion)


async def _derender(request: web.Request, model: type[B], read_back: Callable[[Serving, B, str], Json]) -> web.Response:
    raw = await read_json(request)
    serving = request.app[WORKER].require_serving()
    body = await offload(is_large(request), parse_derender, model, raw)
    serving.check_model(body.model)
    return json_response(await offload(is_large(request), read_back, serving, body, request[REQUEST_ID]))


def _chat(serving: Serving, body: DerenderChatBody, request_id: str) -> Json:
    answer = body.generate_response
    check_generated(serving, answer, "generate_response")
    given = body.chat_request
    chat_body = parse_context({}) if given is None else parse_chat(_without_stream(given))
    sampling = sampling_of(serving, chat_body)
    sampling = replace(
        sampling, skip_special_tokens=sampling.skip_special_tokens and not serving.chat.keeps_special_tokens
    )
    prompt = answer.prompt_token_ids or body.prompt_token_ids or []
    choices = [replay(serving, i, one, prompt, sampling) for i, one in enumerate(answer.choices)]
    shape = ChatShape(answer_id("chatcmpl-", answer.request_id or request_id), serving, chat_body)
    return shape.answer(choices, usage_of([answer], choices, body.prompt_tokens)) | passed_on([answer])


def _completion(serving: Serving, body: DerenderCompletionBody, request_id: str) -> Json:
    answers = body.generate_responses
    asked = _completion_request(body, answers)
    prompts = _prompts(serving, body, asked, answers)
    sampling = sampling_of(serving, asked)
    choices: list[Choice] = []
    for answer, prompt in zip(answers, prompts, strict=True):
        check_generated(serving, answer, "generate_responses")
        choices += [replay(serving, len(choices) + i, one, prompt, sampling) for i, one in enumerate(answer.choices)]
    shape = CompletionShape(answer_id("cmpl-", answers[0].request_id or request_id), serving, asked)
    return shape.answer(choices, usage_of(answers, choices, body.prompt_tokens)) | passed_on(answers)


def _completion_request(body: DerenderCompletionBody, answers: Sequence[Generated]) -> CompletionBody:
    """The request that was rendered, or one that asks for what the answers have."""
    given = body.completion_request
    if given is None:
        alternatives = [
            len(token.top_logprobs or ())
            for answer in answers
            for choice in answer.choices
            for token in (choice.logprobs and choice.logprobs.content) or ()
        ]
        return CompletionBody(prompt=[""] * len(answers), logprobs=max(alternatives, default=None))
    asked = parse_completion(_without_stream(given))
    if len(asked.prompt) != len(answers):
        param = "generate_responses"
        raise bad_request(
            f"{param}: one for each of {len(asked.prompt)} prompts expected, got {len(answers)}", param=param
        )
    for index, answer in enumerate(answers):
        if len(answer.choices) != asked.num_choices:
            param = f"generate_responses[{index}].choices"
            raise bad_request(f"{param}: n={asked.num_choices} expected, got {len(answer.choices)}", param=param)
    return asked


def _prompts(
    serving: Serving, body: DerenderCompletionBody, asked: CompletionBody, answers: Sequence[Generated]
) -> list[list[int]]:
    """The ids of each prompt, as far as they are told."""
    prompts = []
    for prompt, answer in zip(asked.prompt, answers, strict=True):
        if isinstance(prompt, list):
            serving.check_prompt(prompt, "completion_request.prompt")
        alone = body.prompt_token_ids if len(answers) == 1 else None
        prompts.append(answer.prompt_token_ids or alone or (prompt if isinstance(prompt, list) else []))
    return prompts


def sampling_of(serving: Serving, asked: SamplingBody) -> SamplingParams:
    # As many logprobs as were told elsewhere: here they cost nothing.
    return asked.sampling(max_tokens=serving.max_model_len, vocab_size=serving.vocab_size, max_logprobs=MAX_TOP)


def answer_id(prefix: str, request_id: str) -> str:
    return request_id if request_id.startswith(prefix) else prefix + request_id


def _without_stream(body: Json) -> Json:
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}

"""From engine outputs to an HTTP answer, streamed or whole: the path all endpoints that generate share.

An endpoint brings its requests and a `Shape` that says how its JSON looks; nothing here depends on which it is.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson
from aiohttp import web

from connectors.wire.note import TOKEN_NOTE, first_note, last_note
from connectors.wire.openai import APIError, error_body, unavailable
from connectors.wire.transfer import PREFIX_CACHE_MISS, ECTransferParams, KVTransferParams
from engine.api.bodies.generation import StreamBody
from engine.api.call import Call
from engine.api.offload import offload
from engine.client import LEAVING
from engine.logprobs import TokenLogprobs
from engine.messages import Output
from engine.output import Delta, OutputText
from engine.request import Request

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
LONG_ANSWER = 8192
"""Tokens, those of the prompt included, from which an answer in one piece is written in a thread."""
Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One answer in the making."""

    index: int
    request: Request
    output: OutputText
    parts: list[str] = field(default_factory=list)
    """The text of an answer in one piece, as its tokens released it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each of token_ids, if asked for."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    kv_transfer_params: KVTransferParams | None = None
    ec_transfer_params: ECTransferParams | None = None
    num_local_tokens: int = 0
    """Prompt tokens this engine had in its prefix cache."""
    num_external_tokens: int = 0
    """Prompt tokens it loaded from another engine."""
    opened: bool = False
    """A chunk of it has been sent."""
    note: Json = field(default_factory=dict)
    """What its end tells the router beside the transfer params."""

    def take(self, output: Output) -> None:
        """Note what an output says beside its tokens."""
        self.num_local_tokens = max(self.num_local_tokens, output.num_cached_tokens)
        self.num_external_tokens = max(self.num_external_tokens, output.num_external_tokens)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        # What was said once stays said: later outputs may say nothing.
        self.kv_transfer_params = output.kv_transfer_params or self.kv_transfer_params
        self.ec_transfer_params = output.ec_transfer_params or self.ec_transfer_params
        if output.finished:
            self.finish_reason = "stop" if self.stopped else output.finish_reason
            self.stop_reason = self.stop_reason if self.stopped else output.stop_token_id

    @property
    def stopped(self) -> bool:
        """A stop string was found; what the engine sampled since does not count."""
        return isinstance(self.stop_reason, str)

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of the prompt nobody computed for this call, as far as this engine knows: with a remote prefill, what
        the prefill engine says that it did not."""
        params = self.request.kv_transfer_params
        reused = self.num_local_tokens + self.num_external_tokens
        if params is not None and params.do_remote_prefill:
            told = (params.remote_prefill_cached_tokens, params.remote_prefill_pulled_tokens)
            reused = self.num_local_tokens if told == (None, None) else sum(count or 0 for count in told)
        return min(reused, self.request.num_prompt_tokens)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def params_json(self) -> Json:
        """What an answer, or the last event of a choice, has at its top for the router: transfer params, and the note
        if asked for. Nothing before the end."""
        if self.finish_reason is None:
            return {}
        told = {"kv_transfer_params": self.kv_transfer_params, "ec_transfer_params": self.ec_transfer_params}
        return {name: params.to_json() for name, params in told.items() if params is not None} | self.note


class Shape(Protocol):
    """How one endpoint writes its answers. One object per call; it may keep what it told of each choice."""

    @property
    def id(self) -> str:
        """The answer's id, as clients know it."""

    @property
    def name(self) -> str:
        """For metrics and logs."""

    @property
    def end(self) -> bytes:
        """What a stream ends with, whether the answer is whole or not."""

    def opening(self, choice: Choice) -> list[Json]:
        """Events before a choice's first text."""

    def events(self, choice: Choice, delta: Delta) -> list[Json]:
        """Events for what a choice has gained, none if it is not to be told yet. With its finish_reason set it is the
        choice's last delta."""

    def closing(self, choices: Sequence[Choice], usage: Json, *, include_usage: bool) -> list[Json]:
        """Events after the last choice has ended."""

    def frame(self, event: Json) -> bytes:
        """One server-sent event."""

    def error(self, body: Json) -> bytes:
        """The event that says why the answer breaks off."""

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json: ...


class Generation:
    """The choices of one call while the engine works on them.

    `groups` has the requests of each prompt. The first of a group begins alone: once it has an output the prompt's KV
    is in the prefix cache, whether it was computed or fetched, and the others find it there.
    """

    def __init__(self, call: Call, body: StreamBody, groups: Sequence[Sequence[Request]], shape: Shape) -> None:
        self._call = call
        self._body = body
        self._shape = shape
        self._first = [group[0] for group in groups]
        self._waiting = {group[0].request_id: group[1:] for group in groups if len(group) > 1}
        self._told = False
        """All of the answer is on its way."""
        tokenizer = call.serving.tokenizer
        self.choices = [
            Choice(
                index,
                request,
                OutputText(
                    tokenizer.stream(skip_special_tokens=request.sampling.skip_special_tokens),
                    stop=request.sampling.stop,
                    include_stop=request.sampling.include_stop_str_in_output,
                    min_tokens=request.sampling.min_tokens,
                ),
            )
            for index, request in enumerate(request for group in groups for request in group)
        ]

    async def respond(self) -> web.StreamResponse:
        try:
            return await (self._stream() if self._body.stream else self._whole())
        finally:
            if not self._told:  # nobody will come for the blocks that it offers
                for choice in self.choices:
                    self._call.serving.client.give_back(choice.kv_transfer_params)

    async def _whole(self) -> web.Response:
        async with aclosing(self._steps()) as steps:
            async for choice, delta in steps:
                choice.parts += delta.texts
        if self._body.token_note:
            first = self.choices[0]
            first.note = {TOKEN_NOTE: self._first_note(first) | last_note(first.token_ids)}
        usage = self._usage()
        large = usage["total_tokens"] >= LONG_ANSWER
        response = await offload(large, lambda: json_response(self._shape.answer(self.choices, usage)))
        self._told = True
        return response

    async def _stream(self) -> web.StreamResponse:
        shape = self._shape
        async with aclosing(self._steps()) as steps:
            # What fails before the first token is answered with its own status, not with a stream that breaks.
            first = await anext(steps)
            response = web.StreamResponse(headers=SSE_HEADERS)
            await response.prepare(self._call.http)
            try:
                await self._write(response, *first)
                async for step in steps:
                    await self._write(response, *step)
                closing = shape.closing(self.choices, self._usage(), include_usage=self._body.include_usage)
                await response.write(b"".join(map(shape.frame, closing)) + shape.end)
                self._told = True
            except ConnectionError:  # the client left; nobody is there to be told
                return response
            except APIError as error:
                await response.write(shape.error(error.body()) + shape.end)
            except Exception:
                logger.exception("a stream broke", extra={"request_id": self._call.request_id})
                body = error_body("internal error", type="InternalServerError", code=500)
                await response.write(shape.error(body) + shape.end)
            await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, choice: Choice, delta: Delta) -> None:
        noted = bool(self._body.token_note) and choice.index == 0
        if noted and choice.finish_reason is not None:
            choice.note = {TOKEN_NOTE: last_note(choice.token_ids)}
        events = self._shape.events(choice, delta)
        if events and not choice.opened:
            choice.opened = True
            events = self._shape.opening(choice) + events
            if noted:
                events[0] = {**events[0], TOKEN_NOTE: self._first_note(choice) | events[0].get(TOKEN_NOTE, {})}
        if self._body.continuous_usage:
            usage = self._usage()
            events = [{**event, "usage": usage} for event in events]
        if events:
            await response.write(b"".join(map(self._shape.frame, events)))

    def _first_note(self, choice: Choice) -> Json:
        return first_note(self._body.token_note, choice.request.prompt_token_ids, choice.num_reused_tokens)

    async def _steps(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Submit, then yield what each choice gains until all have finished. Raises APIError if one fails."""
        by_id = {choice.request.request_id: choice for choice in self.choices}
        client = self._call.serving.client
        later = [request for requests in self._waiting.values() for request in requests]
        outputs = client.submit(self._first, later, names=(*self._call.names, self._shape.id))
        self._call.hand_over()
        try:
            async with outputs:
                async for output in outputs:
                    choice = by_id[output.request_id]
                    delta = self._advance(choice, output, asked_to_abort=output.request_id in outputs.aborted)
                    for sibling in self._waiting.pop(output.request_id, ()):
                        client.start(sibling)
                    if delta.stop_string is not None and not output.finished:
                        client.stop(output.request_id, choice.output.num_tokens)
                    if output.finished:
                        self._check_handoff(choice)
                    yield choice, delta
        finally:
            self._log()

    def _advance(self, choice: Choice, output: Output, *, asked_to_abort: bool) -> Delta:
        if choice.stopped:  # by a stop string: the answer is whole, however the engine's side ends
            choice.take(output)
            self._settle_offer(choice)
            return Delta((), [])
        if output.finish_reason == "error":
            choice.finish_reason = "error"
            raise _failure(output)
        if output.finish_reason == "abort" and not asked_to_abort:
            raise unavailable(LEAVING, retry_after=5)
        hide_last = output.finish_reason == "stop" and not choice.request.sampling.include_stop_str_in_output
        delta = choice.output.push(output.token_ids, last=output.finished, hide_last=hide_last)
        delta = replace(delta, logprobs=output.logprobs[: len(delta.token_ids)])
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.stop_reason = delta.stop_string
        choice.take(output)
        self._settle_offer(choice)
        return delta

    def _settle_offer(self, choice: Choice) -> None:
        """An engine that ended the request before it heard of a stop string offers KV of more than the answer; and of
        several answers to one request, none is what the next turn goes on from. Nor is one that was aborted."""
        params = choice.kv_transfer_params
        aborted = choice.finish_reason == "abort"
        if aborted:
            choice.ec_transfer_params = None
        if params is None or not (params.do_remote_decode or aborted):
            return
        num_tokens = choice.request.num_prompt_tokens + choice.output.num_tokens
        if aborted or len(self.choices) > 1:
            choice.kv_transfer_params = None
        elif (params.remote_num_tokens or 0) > num_tokens:
            choice.kv_transfer_params = params.trimmed(num_tokens, block_size=choice.request.block_size)
        if choice.kv_transfer_params is None:
            self._call.serving.client.give_back(params)

    def _check_handoff(self, choice: Choice) -> None:
        params = choice.request.kv_transfer_params
        if params is not None and params.do_remote_decode and choice.kv_transfer_params is None:
            self._call.serving.metrics.handoff_missing(self._shape.name)
            logger.warning("no blocks to hand over", extra={"request_id": self._call.request_id})

    def _usage(self) -> Json:
        firsts = {request.request_id for request in self._first}  # a prompt with several answers counts once
        prompts = [choice for choice in self.choices if choice.request.request_id in firsts]
        prompt = sum(choice.request.num_prompt_tokens for choice in prompts)
        output = sum(choice.output.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_reused_tokens for choice in prompts)},
        }

    def _log(self) -> None:
        usage = self._usage()
        logger.info(
            "answered",
            extra={
                "request_id": self._call.request_id,
                "endpoint": self._shape.name,
                "finish_reason": ",".join(choice.finish_reason or "abort" for choice in self.choices),
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "output_tokens": usage["completion_tokens"],
            },
        )


def json_response(value: Json | list[Json], *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def frame(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _failure(output: Output) -> APIError:
    message = output.error or "generation failed"
    if output.error_status == 409:
        return APIError(409, message, type="ConflictError", param="kv_transfer_params", code=PREFIX_CACHE_MISS)
    kind = "BadRequestError" if output.error_status < 500 else "InternalServerError"
    return APIError(output.error_status, message, type=kind)

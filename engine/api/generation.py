"""From engine outputs to an HTTP answer, streamed or whole: the path chat and plain completions share.

An endpoint brings its requests and a `Shape` that says how its JSON looks; nothing here depends on which it is.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from aiohttp import web

from connectors.wire.openai import APIError, error_body, unavailable
from connectors.wire.transfer import PREFIX_CACHE_MISS, KVTransferParams
from engine.api.call import Call
from engine.api.protocol import GenerationBody
from engine.hashing import hash_seed
from engine.messages import Output
from engine.output import Delta, OutputText
from engine.request import Request

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One answer in the making."""

    index: int
    request: Request
    output: OutputText
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    kv_transfer_params: KVTransferParams | None = None
    num_local_tokens: int = 0
    """Prompt tokens this engine had in its prefix cache."""
    num_external_tokens: int = 0
    """Prompt tokens it loaded from another engine."""
    opened: bool = False
    """A chunk of it has been sent."""

    def take(self, output: Output) -> None:
        """Note what an output says beside its tokens."""
        self.num_local_tokens = max(self.num_local_tokens, output.num_cached_tokens)
        self.num_external_tokens = max(self.num_external_tokens, output.num_external_tokens)
        if output.finished:
            self.finish_reason = "stop" if self.stopped else output.finish_reason
            self.stop_reason = self.stop_reason if self.stopped else output.stop_token_id
            self.kv_transfer_params = output.kv_transfer_params

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
    def kv_json(self) -> Json:
        """The entry an answer or finish chunk gets, or nothing."""
        params = self.kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params.to_json()}


class Shape(Protocol):
    """How one endpoint writes its answers."""

    @property
    def name(self) -> str:
        """For metrics and logs."""

    def opening(self, choice: Choice) -> Json | None:
        """The chunk that comes before a choice's first text, if the endpoint has one."""

    def chunk(self, choice: Choice, delta: Delta, *, first: bool) -> Json:
        """A chunk with new text; the last one of a choice has its finish_reason."""

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk after the last choice, with stream_options.include_usage."""

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json: ...


class Generation:
    """The choices of one call while the engine works on them."""

    def __init__(self, call: Call, body: GenerationBody, requests: Sequence[Request], shape: Shape) -> None:
        self._call = call
        self._body = body
        self._shape = shape
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
            for index, request in enumerate(requests)
        ]

    async def respond(self) -> web.StreamResponse:
        if self._body.stream:
            return await self._stream()
        async with aclosing(self._steps()) as steps:
            async for choice, delta in steps:
                choice.parts.append(delta.text)
                choice.token_ids += delta.token_ids
        return json_response(self._shape.answer(self.choices, self._usage()))

    async def _stream(self) -> web.StreamResponse:
        async with aclosing(self._steps()) as steps:
            # What fails before the first token is answered with its own status, not with a stream that breaks.
            first = await anext(steps)
            response = web.StreamResponse(headers=SSE_HEADERS)
            await response.prepare(self._call.http)
            try:
                await self._write(response, *first)
                async for step in steps:
                    await self._write(response, *step)
                if self._body.include_usage:
                    await response.write(frame(self._shape.usage_chunk(self._usage())))
            except ConnectionError:  # the client left; nobody is there to be told
                return response
            except APIError as error:
                await response.write(frame(error.body()))
            except Exception:
                logger.exception("a stream broke", extra={"request_id": self._call.request_id})
                await response.write(frame(error_body("internal error", type="InternalServerError", code=500)))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, choice: Choice, delta: Delta) -> None:
        chunks = []
        first = not choice.opened
        if first and (opening := self._shape.opening(choice)) is not None:
            chunks.append(opening)
        if delta.text or choice.finish_reason or (self._body.return_token_ids and delta.token_ids):
            chunks.append(self._shape.chunk(choice, delta, first=first))
        choice.opened = choice.opened or bool(chunks)
        if self._body.continuous_usage:
            usage = self._usage()
            chunks = [{**chunk, "usage": usage} for chunk in chunks]
        if chunks:
            await response.write(b"".join(map(frame, chunks)))

    async def _steps(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Submit, then yield what each choice gains until all have finished. Raises APIError if one fails."""
        by_id = {choice.request.request_id: choice for choice in self.choices}
        client = self._call.serving.client
        outputs = client.submit([choice.request for choice in self.choices])
        self._call.hand_over()
        try:
            async with outputs:
                async for output in outputs:
                    choice = by_id[output.request_id]
                    delta = self._advance(choice, output)
                    if delta.stop_string is not None and not output.finished:
                        client.stop(output.request_id, choice.output.num_tokens)
                    if output.finished:
                        self._check_handoff(choice)
                    yield choice, delta
        finally:
            self._log()

    def _advance(self, choice: Choice, output: Output) -> Delta:
        if choice.stopped:  # by a stop string: the answer is whole, however the engine's side ends
            choice.take(output)
            self._cut_offer(choice)
            return Delta("", [])
        if output.finish_reason == "error":
            choice.finish_reason = "error"
            raise _failure(output)
        if output.finish_reason == "abort":
            raise unavailable("this engine is shutting down, send the request to another", retry_after=5)
        hide_last = output.finish_reason == "stop" and not choice.request.sampling.include_stop_str_in_output
        delta = choice.output.push(output.token_ids, last=output.finished, hide_last=hide_last)
        choice.stop_reason = delta.stop_string
        choice.take(output)
        if delta.stop_string is not None:
            self._cut_offer(choice)
        return delta

    def _cut_offer(self, choice: Choice) -> None:
        """An engine that ended the request before it heard of the stop string offers KV of more than the answer."""
        params = choice.kv_transfer_params
        if params is None or not params.do_remote_decode:
            return
        num_tokens = choice.request.num_prompt_tokens + choice.output.num_tokens
        if (params.remote_num_tokens or 0) > num_tokens:
            choice.kv_transfer_params = params.trimmed(num_tokens, block_size=choice.request.block_size)
            if choice.kv_transfer_params is None:
                self._call.serving.client.give_back(params)

    def _check_handoff(self, choice: Choice) -> None:
        params = choice.request.kv_transfer_params
        if params is not None and params.do_remote_decode and choice.kv_transfer_params is None:
            self._call.serving.metrics.handoff_missing(self._shape.name)
            logger.warning("no blocks to hand over", extra={"request_id": self._call.request_id})

    def _usage(self) -> Json:
        prompt = sum(choice.request.num_prompt_tokens for choice in self.choices)
        output = sum(choice.output.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_reused_tokens for choice in self.choices)},
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


def make_request(call: Call, body: GenerationBody, prompt: list[int], request_id: str) -> Request:
    """The engine's request for one checked prompt. Raises APIError 400."""
    serving = call.serving
    room = serving.max_model_len - len(prompt)
    max_tokens = room if body.requested_max_tokens is None else min(room, body.requested_max_tokens)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=body.sampling(max_tokens=max_tokens, vocab_size=serving.vocab_size),
        eos_token_ids=serving.tokenizer.eos_token_ids,
        block_size=serving.block_size,
        hash_seed=hash_seed(serving.model_fingerprint, body.cache_salt),
        kv_transfer_params=call.kv_transfer_params,
    )


def json_response(value: Json, *, status: int = 200) -> web.Response:
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

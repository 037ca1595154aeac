"""Requests of tokens for tokens: the prompt as ids, the sampling fields in an object of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import MAX_TOKEN_IDS, TokenId, at_most, parse, refuse_unsupported
from engine.api.bodies.chat import ChatBody, parse_chat
from engine.api.bodies.generation import StreamBody, check_stream_options
from engine.api.bodies.media import Features
from engine.api.bodies.sampling import UNSUPPORTED, SamplingBody

OutputMode = Literal["tokens", "text", "derender"]


class TokenSampling(SamplingBody):
    """`sampling_params`. Without max_tokens the answer may fill the context."""

    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class GenerateBody(StreamBody):
    token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    sampling_params: TokenSampling = TokenSampling()
    output_mode: OutputMode = "tokens"
    """What a choice has beside its ids: nothing, its text, or the message a chat would have had."""
    parse_context: dict[str, Any] | None = None
    """Of a chat, as its render tells it: how the message is to be read. For output_mode "derender"."""
    priority: int | None = None
    features: Features | None = None
    """Pictures in the prompt, whose encodings the request's ec_transfer_params tell of."""

    @field_validator("token_ids", mode="before")
    @classmethod
    def _token_ids(cls, value: object) -> object:
        return at_most(MAX_TOKEN_IDS, value, "ids")

    @property
    def sampling(self) -> TokenSampling:
        """sampling_params, with what stands beside them."""
        return self.sampling_params.model_copy(update={"priority": self.priority})


CONTEXT = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning")
"""The fields of a chat that say how its answer is read."""
_SAMPLING_OFF = {f"sampling_params.{name}": off for name, off in UNSUPPORTED.items()}


def parse_generate(body: Mapping[str, Any]) -> GenerateBody:
    if body.get("content_parts"):
        raise bad_request("content_parts: not taken by this engine, leave it out", param="content_parts")
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        refuse_unsupported({f"sampling_params.{name}": value for name, value in sampling.items()}, _SAMPLING_OFF)
    parsed = parse(GenerateBody, body)
    check_stream_options(parsed)
    if parsed.output_mode == "derender" and parsed.stream:
        raise bad_request('output_mode: "derender" is not possible with stream=true', param="output_mode")
    return parsed


def parse_context(context: Mapping[str, Any]) -> ChatBody:
    """A chat whose answer is read as this context says. Raises APIError 400."""
    if unknown := context.keys() - set(CONTEXT):
        where = f"parse_context.{min(unknown)[:40]}"
        raise bad_request(f"{where}: unknown, one of {', '.join(CONTEXT)} expected", param=where)
    return parse_chat({**context, "messages": [{"role": "user", "content": ""}]})

"""Requests to turn generated ids back into an answer of the chat or completions endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import MAX_TOKEN_IDS, Body, TokenId, at_most, parse
from engine.api.bodies.sampling import MAX_CHOICES

MAX_RESPONSES = 1024
MAX_TOP = 1024
"""Alternatives for one token."""
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Counts are added up, and JSON's numbers end there for many readers."""
B = TypeVar("B", bound="DerenderBody")


class TopLogprob(Body):
    token_id: TokenId
    logprob: float


class GeneratedLogprob(TopLogprob):
    rank: int | None = None
    top_logprobs: Annotated[list[TopLogprob], Field(max_length=MAX_TOP, fail_fast=True)] | None = None


class GeneratedLogprobs(Body):
    content: Annotated[list[GeneratedLogprob], Field(fail_fast=True)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, value: object) -> object:
        return at_most(MAX_TOKEN_IDS, value, "tokens")


class GeneratedChoice(Body):
    token_ids: TokenIds | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: GeneratedLogprobs | None = None

    @field_validator("token_ids", mode="before")
    @classmethod
    def _token_ids(cls, value: object) -> object:
        return at_most(MAX_TOKEN_IDS, value, "ids")


class CachedTokens(Body):
    cached_tokens: Count | None = None


class GeneratedUsage(Body):
    prompt_tokens: Count | None = None
    prompt_tokens_details: CachedTokens | None = None


class Generated(Body):
    """An answer of /inference/v1/generate."""

    request_id: Annotated[str, Field(max_length=512)] | None = None
    choices: Annotated[list[GeneratedChoice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    usage: GeneratedUsage | None = None
    prompt_token_ids: TokenIds | None = None
    kv_transfer_params: dict[str, Any] | None = None


class DerenderBody(Body):
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: Count | None = None
    """For the usage, if the generated answer does not tell."""
    prompt_token_ids: TokenIds | None = None

    @field_validator("prompt_token_ids", mode="before")
    @classmethod
    def _prompt_token_ids(cls, value: object) -> object:
        return at_most(MAX_TOKEN_IDS, value, "ids")


class DerenderChatBody(DerenderBody):
    generate_response: Generated
    chat_request: dict[str, Any] | None = None
    """What was rendered, for how the answer is to be read."""


class DerenderCompletionBody(DerenderBody):
    generate_responses: Annotated[list[Generated], Field(min_length=1, max_length=MAX_RESPONSES, fail_fast=True)]
    """One for each prompt."""
    completion_request: dict[str, Any] | None = None


def parse_derender(model: type[B], body: Mapping[str, Any]) -> B:
    parsed = parse(model, body)
    if parsed.stream:
        raise bad_request("stream: a stream cannot be derendered by this engine, send whole answers", param="stream")
    return parsed

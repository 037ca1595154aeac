"""The fields every endpoint that generates has beside its prompt and its sampling fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import Body
from engine.api.bodies.sampling import SamplingBody

_NOT_IN_SALT = frozenset("@/\\\0")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: the usage so far on every chunk."""


class StreamBody(Body):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    token_note: Literal["output"] | bool | None = None
    """Ours, asked by the router: see connectors/wire/note.py."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    @field_validator("cache_salt")
    @classmethod
    def _cache_salt(cls, value: str | None) -> str | None:
        if value is not None and (wrong := _NOT_IN_SALT & set(value)):
            raise ValueError(f"must not contain {min(wrong)!r}")
        return value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class GenerationBody(StreamBody, SamplingBody):
    """What chat and plain completions have in common."""

    add_special_tokens: bool | None = None


def check_stream_options(body: StreamBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream=true", param="stream_options")

"""Completion requests: one or several prompts, as text or ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import TokenId, is_id, parse, refuse_unsupported
from engine.api.bodies.generation import GenerationBody, check_stream_options
from engine.api.bodies.sampling import UNSUPPORTED


class CompletionBody(GenerationBody):
    prompt: Annotated[list[str | Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    """One entry per prompt: text, or token ids."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: object) -> object:
        """One prompt, as text or ids, becomes a list of one."""
        if isinstance(value, str) or (isinstance(value, list) and value and all(is_id(item) for item in value)):
            return [value]
        if not isinstance(value, list):
            raise ValueError("a string, a list of token ids, or a list of those expected")
        for index, item in enumerate(value):
            if not isinstance(item, str) and not (isinstance(item, list) and all(is_id(i) for i in item)):
                raise ValueError(f"prompt {index} is neither a string nor a list of token ids")
        return value


_COMPLETION_OFF: dict[str, tuple[object, ...]] = {"logprobs": (None,)}


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    refuse_unsupported(body, UNSUPPORTED | _COMPLETION_OFF)
    parsed = parse(CompletionBody, body)
    if not parsed.prompt or any(len(prompt) == 0 and not isinstance(prompt, str) for prompt in parsed.prompt):
        raise bad_request("prompt: must not be empty", param="prompt")
    check_stream_options(parsed)
    return parsed

"""Completion requests: one or several prompts, as text or ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import TokenId, is_id, parse, refuse_unsupported
from engine.api.bodies.generation import GenerationBody, check_stream_options
from engine.api.bodies.response_format import ResponseFormat, response_grammar
from engine.api.bodies.sampling import UNSUPPORTED
from engine.grammar import GrammarSpec

DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody):
    prompt: Annotated[list[str | Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    """One entry per prompt: text, or token ids."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0: only the prompt is to be told; it needs echo."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    return_tokens_as_token_ids: bool | None = None

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[int] | list[str | list[int]])
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

    @property
    def requested_max_tokens(self) -> int:
        """Of the engine, which cannot but give one."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def only_prompt(self) -> bool:
        return self.max_tokens == 0

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        return response_grammar(self.response_format, super().grammar_spec)


_SUPPORTED = ("echo", "best_of", "response_format")
_UNSUPPORTED = {name: off for name, off in UNSUPPORTED.items() if name not in _SUPPORTED}


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    refuse_unsupported(body, _UNSUPPORTED)
    parsed = parse(CompletionBody, body)
    if not parsed.prompt or any(len(prompt) == 0 and not isinstance(prompt, str) for prompt in parsed.prompt):
        raise bad_request("prompt: must not be empty", param="prompt")
    if parsed.best_of not in (None, 1, parsed.num_choices):
        raise bad_request(
            f"best_of: only 1 or n={parsed.num_choices} is possible, got {parsed.best_of}", param="best_of"
        )
    if parsed.only_prompt and (parsed.stream or not parsed.echo):
        raise bad_request(
            "max_tokens: input should be greater than or equal to 1, or 0 with echo=true and without stream, got 0",
            param="max_tokens",
        )
    check_stream_options(parsed)
    return parsed

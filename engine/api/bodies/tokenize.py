"""Requests to /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from engine.api.bodies.base import MAX_TOKEN_IDS, Body, TokenId, at_most, parse, refuse_unsupported
from engine.api.bodies.chat import ChatPrompt, check_prompt_end
from engine.api.bodies.responses import ResponsesPrompt
from engine.api.bodies.sampling import UNSUPPORTED


class TokenizeBody(Body):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    known_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    """The conversation's ids so far: those sampled stay in the prompt where the text is the same."""

    @field_validator("known_token_ids", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        return at_most(MAX_TOKEN_IDS, value, "ids")


class TokenizeText(TokenizeBody):
    prompt: str


class TokenizeChat(TokenizeBody, ChatPrompt):
    pass


class TokenizeResponses(TokenizeBody, ResponsesPrompt):
    pass


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    @field_validator("tokens", mode="before")
    @classmethod
    def _tokens(cls, value: object) -> object:
        return at_most(MAX_TOKEN_IDS, value, "ids")


_TOKENIZE_CHAT_OFF = {"chat_template": UNSUPPORTED["chat_template"]}


def parse_tokenize_chat(body: Mapping[str, Any]) -> TokenizeChat:
    """What would change a chat's prompt is taken, or refused, as the chat endpoint does it."""
    refuse_unsupported(body, _TOKENIZE_CHAT_OFF)
    parsed = parse(TokenizeChat, body)
    check_prompt_end(parsed)
    return parsed

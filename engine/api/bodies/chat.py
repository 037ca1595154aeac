"""Chat requests: messages, tools, and what the template gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import OFF, Body, Objects, at_most, parse, refuse_unsupported
from engine.api.bodies.generation import GenerationBody, check_stream_options
from engine.api.bodies.sampling import UNSUPPORTED

MAX_MESSAGES = 8192
MAX_PARTS, MAX_PARTS_IN_ALL = 8192, 1 << 16
MAX_TOOLS = 8192


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message; keys not named here reach the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, value: object) -> object:
        if value is not None and not isinstance(value, str | list):
            raise ValueError("a string or a list of content parts expected")
        if isinstance(value, list):
            at_most(MAX_PARTS, value, "content parts")
        for index, part in enumerate(value if isinstance(value, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ValueError(f"content part {index} has type {kind!r}; this engine takes text parts only")
            if not isinstance(part.get("text"), str):
                raise ValueError(f"content part {index} has no text")
        return value

    def for_template(self) -> dict[str, Any]:
        """What the client sent, defaults left out. Not model_dump: that fails on values nested some hundred deep."""
        given = {name: value for name, value in self if name in self.model_fields_set}
        if isinstance(self.content, list):
            given["content"] = [{"type": part.type, "text": part.text} for part in self.content]
        return given


class ChatPrompt(Body):
    """The part of a chat request that the template sees; `/tokenize` takes it too."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Objects | None = None
    documents: Objects | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: object) -> object:
        at_most(MAX_MESSAGES, value, "messages")
        contents = (item.get("content") for item in value if isinstance(item, dict)) if isinstance(value, list) else ()
        in_all = sum(len(content) for content in contents if isinstance(content, list))
        if in_all > MAX_PARTS_IN_ALL:
            raise ValueError(f"at most {MAX_PARTS_IN_ALL} content parts are possible in all, got {in_all}")
        return value

    @field_validator("tools", "documents", mode="before")
    @classmethod
    def _objects(cls, value: object) -> object:
        return at_most(MAX_TOOLS, value, "entries")

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message


class ChatBody(GenerationBody, ChatPrompt):
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens; wins over it."""

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_CHAT_OFF: dict[str, tuple[object, ...]] = {"logprobs": OFF}


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    refuse_unsupported(body, UNSUPPORTED | _CHAT_OFF)
    parsed = parse(ChatBody, body)
    choice = body.get("tool_choice")
    if parsed.tools and choice != "none":
        raise bad_request(
            'tool_choice: only "none" is supported with tools: this engine does not parse tool calls',
            param="tool_choice",
        )
    if not parsed.tools and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice: needs tools", param="tool_choice")
    check_prompt_end(parsed)
    check_stream_options(parsed)
    return parsed


def check_prompt_end(body: ChatPrompt) -> None:
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request(
            "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
        )

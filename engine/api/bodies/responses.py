"""Responses requests: input items, instructions, functions, and how the answer is to look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from connectors.wire.openai import APIError, bad_request
from engine.api.bodies.base import OFF, Body, Objects, at_most, parse, refuse_unsupported
from engine.api.bodies.chat import MAX_FUNCTION_NAME, MAX_TOOLS
from engine.api.bodies.generation import StreamBody, check_stream_options
from engine.api.bodies.media import MediaFields
from engine.api.bodies.sampling import UNSUPPORTED, SamplingBody
from engine.api.bodies.structured import json_schema
from engine.formats.base import ToolChoice
from engine.grammar import GrammarSpec

MAX_ITEMS = 8192
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_LABEL = 512
"""Characters of what an answer repeats: user, prompt_cache_key and the like."""
WITH_LOGPROBS = "message.output_text.logprobs"
# Beside it, what only built-in tools and stored reasoning have; nothing of the kind is ever left out of an answer.
_INCLUDABLE = (
    WITH_LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_MODES = ("none", "auto", "required")

Label = Annotated[str, Field(max_length=MAX_LABEL)]
Json = dict[str, Any]


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _type(cls, value: object) -> object:
        if value != "function":
            raise ValueError(f'only "function" is supported by this engine, got {str(value)[:40]!r}')
        return value

    def to_json(self) -> Json:
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function"} | told | {"strict": self.strict}

    @property
    def for_chat(self) -> Json:
        """As chat requests, and with them the templates, have it."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME)] | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    def to_json(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        told = {"name": self.name, "description": self.description, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type} | told

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("type") == "json_schema":
            for key in ("name", "schema"):
                if value.get(key) is None:
                    raise ValueError(f'{key} is required with the type "json_schema"')
        return value


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesPrompt(MediaFields):
    """The part of a request that becomes its prompt."""

    input: str | Objects
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Json | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _input(cls, value: object) -> object:
        if not isinstance(value, str | list):
            raise ValueError("a string or a list of items expected")
        if not value:
            raise ValueError("must not be empty")
        at_most(MAX_ITEMS, value, "items")
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if not isinstance(item, dict):
                raise ValueError(f"item {index} is not an object")
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _tools(cls, value: object) -> object:
        return at_most(MAX_TOOLS, value, "entries")


class ResponsesBody(StreamBody, SamplingBody, ResponsesPrompt):
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    """Taken, for clients say true without meaning it, and answered with false: nothing is kept."""
    metadata: dict[str, str] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _tool_choice(cls, value: object) -> object:
        if value is None or value in _MODES:
            return value
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "function" and isinstance(value, dict) and isinstance(value.get("name"), str):
            return value
        raise ValueError('"none", "auto", "required" or {"type": "function", "name": ...} expected')

    @field_validator("include")
    @classmethod
    def _include(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in _INCLUDABLE:
                raise ValueError(f"{name[:60]!r} cannot be included")
        return value

    @field_validator("metadata")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        at_most(MAX_METADATA, value, "entries")
        for key, text in (value or {}).items():
            if len(key) > MAX_METADATA_KEY or len(text) > MAX_METADATA_VALUE:
                raise ValueError(
                    f"keys have at most {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}, "
                    f"got {len(key)} and {len(text)}"
                )
        return value

    @property
    def choice(self) -> ToolChoice:
        """Of the functions that the request brings."""
        if isinstance(self.tool_choice, dict):
            return f"={self.tool_choice['name']}"
        return (self.tool_choice or "auto") if self.tools else "none"

    @property
    def parallel(self) -> bool:
        """Whether one answer may have several calls."""
        return self.parallel_tool_calls is not False

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        asked = bool(self.top_logprobs) or WITH_LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else None

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """The content's: calls have their own."""
        other = super().grammar_spec
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return other
        if other is not None:
            raise bad_request(f"{other.param}: cannot be combined with text.format", param=other.param)
        if form.type == "json_object":
            return GrammarSpec("json_object", "", "text.format")
        return json_schema(form.schema_, "text.format.schema")

    @property
    def echo(self) -> Json:
        """What the response repeats, with the defaults in place of what was left out."""
        form = (self.text and self.text.format) or TextFormat(type="text")
        text: Json = {"format": form.to_json()}
        if self.text is not None and self.text.verbosity is not None:
            text["verbosity"] = self.text.verbosity
        reasoning = self.reasoning or ReasoningOptions()
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": text,
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.to_json() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "user": self.user,
        }

    @property
    def include_usage(self) -> bool:
        return False  # the last event has it, asked for or not

    @property
    def continuous_usage(self) -> bool:
        return False


_RESPONSES_OFF: dict[str, tuple[object, ...]] = {
    "background": OFF,
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "truncation": (None, "disabled"),
    # Other endpoints' names for what is called otherwise here, or has no place in the answer.
    "max_tokens": (None,),
    "max_completion_tokens": (None,),
    "n": (None, 1),
    "prompt_logprobs": (None,),
}
_HERE = frozenset({"top_logprobs"})


def parse_responses(body: Mapping[str, Any]) -> ResponsesBody:
    """Raises APIError: 404 for a response that would have to be stored here, 400 for everything else."""
    refuse_unsupported(body, {name: off for name, off in UNSUPPORTED.items() if name not in _HERE} | _RESPONSES_OFF)
    if (previous := body.get("previous_response_id")) is not None:
        raise not_stored(str(previous), param="previous_response_id", code="previous_response_not_found")
    parsed = parse(ResponsesBody, body)
    names = {tool.name for tool in parsed.tools or ()}
    if not names and parsed.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice: needs tools", param="tool_choice")
    choice = parsed.choice
    if choice.startswith("=") and choice[1:] not in names:
        raise bad_request(
            f"tool_choice.name: {choice[1:60]!r} is none of the functions in tools", param="tool_choice.name"
        )
    check_stream_options(parsed)
    return parsed


def not_stored(response_id: str, *, param: str | None = None, code: str | None = None) -> APIError:
    """404: this engine keeps no responses."""
    message = f"Response with id {response_id[:80]!r} not found: this engine stores none, send the whole conversation."
    return APIError(404, message, type="NotFoundError", param=param, code=code)

"""Chat requests: messages, tools, and what the template gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import Body, Objects, at_most, parse, refuse_unsupported
from engine.api.bodies.generation import GenerationBody, check_stream_options
from engine.api.bodies.media import MediaFields, PicturePart, wrong_with
from engine.api.bodies.response_format import ResponseFormat, response_grammar
from engine.api.bodies.sampling import UNSUPPORTED
from engine.formats.base import Prompt, ToolChoice
from engine.grammar import GrammarSpec

MAX_MESSAGES = 8192
MAX_PARTS, MAX_PARTS_IN_ALL = 8192, 1 << 16
MAX_TOOLS = 8192
MAX_FUNCTION_NAME = 256
ANSWERING_ROLE = "assistant"
RESERVED = frozenset(
    ["self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"]
)
"""What chat_template_kwargs cannot set: the body has fields for it, or nobody may."""


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message; keys not named here reach the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart | PicturePart] | None = None
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
            if kind in ("image_url", "image_embeds"):
                if wrong := wrong_with(part):
                    raise ValueError(f"content part {index} {wrong}")
            elif kind != "text":
                raise ValueError(
                    f"content part {index} has type {str(kind)[:40]!r}; this engine takes text and image_url parts"
                )
            elif not isinstance(part.get("text"), str):
                raise ValueError(f"content part {index} has no text")
        return value

    @property
    def text(self) -> str:
        """Its content, of parts on a line each."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """What the client sent, defaults left out. Not model_dump: that fails on values nested some hundred deep."""
        given = {name: value for name, value in self if name in self.model_fields_set}
        if isinstance(self.content, list):
            given["content"] = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in self.content
            ]
        return given

    @property
    def pictures(self) -> list[PicturePart]:
        content = self.content if isinstance(self.content, list) else ()
        return [part for part in content if isinstance(part, PicturePart)]


class ChatPrompt(MediaFields):
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

    @field_validator("tools")
    @classmethod
    def _tools(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for index, tool in enumerate(tools or ()):
            if wrong := _wrong_with(tool):
                raise ValueError(f"tool {index} {wrong}")
        return tools

    @property
    def pictures(self) -> list[PicturePart]:
        """In the order in which they are shown."""
        return [part for message in self.messages for part in message.pictures]

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message

    def prompt(self, *, add_special_tokens: bool) -> Prompt:
        """What the model's format makes a prompt of. Raises APIError 400."""
        variables = dict(self.chat_template_kwargs or {})
        if reserved := RESERVED & variables.keys():
            where = f"chat_template_kwargs.{min(reserved)}"
            raise bad_request(f"{where}: cannot be set there", param=where)
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return Prompt(
            messages=[message.for_template() for message in self.messages],
            tools=self.tools,
            add_generation_prompt=self.generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=add_special_tokens,
            variables=variables,
        )


class ChatBody(GenerationBody, ChatPrompt):
    LOGPROBS_FIELD = "top_logprobs"

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens; wins over it."""
    tool_choice: str | None = None
    """As in ToolChoice."""
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None

    @field_validator("tool_choice", mode="before", json_schema_input_type=str | dict[str, Any] | None)
    @classmethod
    def _tool_choice(cls, value: object) -> object:
        if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
            return value
        function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError('"none", "auto", "required", or {"type": "function", "function": {"name": …}} expected')
        return f"={name}"

    @property
    def choice(self) -> ToolChoice:
        """Of the tools that the request brings."""
        return (self.tool_choice or "auto") if self.tools else "none"

    @property
    def parallel(self) -> bool:
        """Whether one answer may have several calls."""
        return self.parallel_tool_calls is not False

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        return response_grammar(self.response_format, super().grammar_spec)

    @property
    def role(self) -> str:
        """Who answers."""
        return ANSWERING_ROLE if self.generation_prompt else self.messages[-1].role

    @property
    def echoed(self) -> str:
        """What stands before the answer: the last message, if it is of the one who answers."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == self.role else ""


_SUPPORTED = ("top_logprobs", "echo", "response_format")
_UNSUPPORTED = {name: off for name, off in UNSUPPORTED.items() if name not in _SUPPORTED}


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(old) not in (None, [], "none"):
            raise bad_request(f"{old}: not supported, use {new}", param=old)
    refuse_unsupported(body, _UNSUPPORTED)
    parsed = parse(ChatBody, body)
    if not parsed.tools and parsed.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice: needs tools", param="tool_choice")
    if parsed.top_logprobs and not parsed.logprobs:
        raise bad_request("top_logprobs: needs logprobs=true", param="top_logprobs")
    if parsed.prompt_logprobs is not None and parsed.stream:
        raise bad_request("prompt_logprobs: not possible in a stream", param="prompt_logprobs")
    check_prompt_end(parsed)
    check_stream_options(parsed)
    return parsed


def check_prompt_end(body: ChatPrompt) -> None:
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request(
            "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
        )


def _wrong_with(tool: Mapping[str, Any]) -> str | None:
    """What is wrong with a tool, if anything."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        return 'must be {"type": "function", "function": {"name": …, "parameters": {…}}}'
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_FUNCTION_NAME or not name.isprintable():
        return f"needs a function name of 1 to {MAX_FUNCTION_NAME} printable characters"
    if not isinstance(function.get("parameters"), dict | None):
        return "has parameters that are no JSON schema"
    return None

"""Request bodies of the OpenAI routes: what is read, in which ranges, and what is refused.

Read strictly (no `"8"` for 8), with the ranges vLLM has. Fields nobody knows are ignored, as vLLM does; fields
whose function this engine lacks are refused by name when they ask for it, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from connectors.wire.openai import APIError, bad_request
from engine.request import SamplingParams

TokenId = Annotated[int, Field(ge=0)]
# Lists end at their first wrong item: an error for each of a million would be made before one is shown.
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
MIN_TEMPERATURE = 0.01
"""Smaller ones are raised to this, as in vLLM: dividing by less overflows."""
MAX_TEMPERATURE = 1e4
"""Far beyond uniform; logits divided by it stay finite and apart in float32. The penalty's limits do the same."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGIT_BIAS = 100.0
# No client has use for more, and each entry costs time on every token.
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1000
MAX_MESSAGES = 8192
MAX_PARTS, MAX_PARTS_IN_ALL = 8192, 1 << 16
MAX_TOOLS = 8192
MAX_TOKEN_IDS = 1 << 20
_MAX_ID_DIGITS = 20
"""Digits of a token id as a key; int() itself refuses thousands of them."""
_INT64 = 2**63

B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: the usage so far on every chunk."""


class GenerationBody(Body):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: object) -> object:
        strings = [value] if isinstance(value, str) else value
        if strings is not None and not (isinstance(strings, list) and all(isinstance(s, str) for s in strings)):
            raise ValueError("a string or a list of strings expected")
        if strings and "" in strings:
            raise ValueError("a stop string cannot be empty")
        if strings and len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are possible, got {len(strings)}")
        if strings and (longest := max(map(len, strings))) > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string has at most {MAX_STOP_LENGTH} characters, got {longest}")
        return strings

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _stop_token_ids(cls, value: object) -> object:
        return _at_most(MAX_STOP_TOKEN_IDS, value, "ids")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _logit_bias(cls, value: object) -> object:
        return _at_most(MAX_LOGIT_BIAS_ENTRIES, value, "entries")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, *, max_tokens: int, vocab_size: int) -> SamplingParams:
        """The parameters for the engine; `max_tokens` is already cut to what the context has room for."""
        min_tokens = self.min_tokens or 0
        asked = self.requested_max_tokens
        if asked is not None and min_tokens > asked:
            raise bad_request(f"min_tokens: must not exceed max_tokens={asked}, got {min_tokens}", param="min_tokens")
        stop_token_ids = frozenset(self.stop_token_ids or ())
        if max(stop_token_ids, default=0) >= vocab_size:
            raise bad_request(
                f"stop_token_ids: token id {max(stop_token_ids)} is out of vocabulary, ids end at {vocab_size - 1}",
                param="stop_token_ids",
            )
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = self.top_k or 0
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
            top_k=0 if top_k == -1 else top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias or {}, vocab_size),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


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
            _at_most(MAX_PARTS, value, "content parts")
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
        _at_most(MAX_MESSAGES, value, "messages")
        contents = (item.get("content") for item in value if isinstance(item, dict)) if isinstance(value, list) else ()
        in_all = sum(len(content) for content in contents if isinstance(content, list))
        if in_all > MAX_PARTS_IN_ALL:
            raise ValueError(f"at most {MAX_PARTS_IN_ALL} content parts are possible in all, got {in_all}")
        return value

    @field_validator("tools", "documents", mode="before")
    @classmethod
    def _objects(cls, value: object) -> object:
        return _at_most(MAX_TOOLS, value, "entries")

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message


class ChatBody(GenerationBody, ChatPrompt):
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens; wins over it."""

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    prompt: Annotated[list[str | Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    """One entry per prompt: text, or token ids."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: object) -> object:
        """One prompt, as text or ids, becomes a list of one."""
        if isinstance(value, str) or (isinstance(value, list) and value and all(_is_id(item) for item in value)):
            return [value]
        if not isinstance(value, list):
            raise ValueError("a string, a list of token ids, or a list of those expected")
        for index, item in enumerate(value):
            if not isinstance(item, str) and not (isinstance(item, list) and all(_is_id(i) for i in item)):
                raise ValueError(f"prompt {index} is neither a string nor a list of token ids")
        return value


class TokenizeBody(Body):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    known_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    """The conversation's ids so far: those sampled stay in the prompt where the text is the same."""

    @field_validator("known_token_ids", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        return _at_most(MAX_TOKEN_IDS, value, "ids")


class TokenizeText(TokenizeBody):
    prompt: str


class TokenizeChat(TokenizeBody, ChatPrompt):
    pass


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    @field_validator("tokens", mode="before")
    @classmethod
    def _tokens(cls, value: object) -> object:
        return _at_most(MAX_TOKEN_IDS, value, "ids")


def _at_most(limit: int, value: object, what: str) -> object:
    """The value, if it is not a collection too long; looked at before its items are."""
    if isinstance(value, list | dict) and len(value) > limit:
        raise ValueError(f"at most {limit} {what} are possible, got {len(value)}")
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_OFF = (None, False)
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": _OFF,
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "echo": _OFF,
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "priority": (None, 0),
    "chat_template": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": _OFF,
}
"""Known fields without a function here, with the values that do not ask for it."""
_TOKENIZE_CHAT_OFF = {"chat_template": _UNSUPPORTED["chat_template"]}
_CHAT_OFF: dict[str, tuple[object, ...]] = {"logprobs": _OFF}
_COMPLETION_OFF: dict[str, tuple[object, ...]] = {"logprobs": (None,)}


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    _refuse_unsupported(body, _UNSUPPORTED | _CHAT_OFF)
    parsed = parse(ChatBody, body)
    choice = body.get("tool_choice")
    if parsed.tools and choice != "none":
        raise bad_request(
            'tool_choice: only "none" is supported with tools: this engine does not parse tool calls',
            param="tool_choice",
        )
    if not parsed.tools and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice: needs tools", param="tool_choice")
    _check_prompt_end(parsed)
    _check_stream_options(parsed)
    return parsed


def parse_tokenize_chat(body: Mapping[str, Any]) -> TokenizeChat:
    """What would change a chat's prompt is taken, or refused, as the chat endpoint does it."""
    _refuse_unsupported(body, _TOKENIZE_CHAT_OFF)
    parsed = parse(TokenizeChat, body)
    _check_prompt_end(parsed)
    return parsed


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    _refuse_unsupported(body, _UNSUPPORTED | _COMPLETION_OFF)
    parsed = parse(CompletionBody, body)
    if not parsed.prompt or any(len(prompt) == 0 and not isinstance(prompt, str) for prompt in parsed.prompt):
        raise bad_request("prompt: must not be empty", param="prompt")
    _check_stream_options(parsed)
    return parsed


def parse(model: type[B], body: Mapping[str, Any]) -> B:
    """Validate a body. Raises APIError 400 whose message and `param` name the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> APIError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "required, but missing"
    elif isinstance(first["input"], bool | int | float):
        message = f"{message}, got {first['input']!r}"
    return bad_request(f"{path}: {message[:1].lower()}{message[1:]}", param=path)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content", "str")` -> `messages[0].content`: pydantic's names of union members left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "list[int]") and not part.startswith(("list[", "constrained-")):
            path += f".{part}" if path else part
    return path


def _refuse_unsupported(body: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    for field, off in table.items():
        value = body.get(field)
        if not any(type(value) is type(harmless) and value == harmless for harmless in off):
            raise bad_request(f"{field}: not supported by this engine, leave it out", param=field)


def _check_prompt_end(body: ChatPrompt) -> None:
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request(
            "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
        )


def _check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream=true", param="stream_options")


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    by_id = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS) or int(key) >= vocab_size:
            raise bad_request(f"logit_bias: {key[:20]!r} is not a token id below {vocab_size}", param="logit_bias")
        by_id[int(key)] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value))
    return tuple(by_id.items())

"""What endpoints ask of the model's format, its refusals told to the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from connectors.wire.openai import bad_request
from engine.api.context import LONG_TEXT, Serving
from engine.api.offload import offload
from engine.formats.base import FormatError, Json, Prompt, PromptTooLong, ToolChoice
from engine.grammar import GrammarError, GrammarSpec


class Asked(Protocol):
    """What a body says of its answer."""

    @property
    def grammar_spec(self) -> GrammarSpec | None: ...
    @property
    def choice(self) -> ToolChoice: ...
    @property
    def parallel(self) -> bool: ...


async def render(serving: Serving, prompt: Prompt, *, param: str, large: bool) -> list[int]:
    """The ids of a prompt, in a thread if they are many. Raises APIError 400, as does `grammar`."""
    return await offload(large or _text_size(prompt) >= LONG_TEXT, _render, serving, prompt, param)


def grammar(
    serving: Serving, asked: Asked, tools: Sequence[Json] | None, prompt_token_ids: Sequence[int], *, param: str
) -> GrammarSpec | None:
    """What the answer must look like from its first token on; `param` is the field to name if it cannot be had."""
    content = asked.grammar_spec
    try:
        return serving.chat.grammar(
            content,
            tools=tools,
            choice=asked.choice,
            parallel=asked.parallel and not asked.choice.startswith("="),  # one named is called once
            prompt_token_ids=prompt_token_ids,
        )
    except GrammarError as error:
        where = param if content is None else content.param
        raise bad_request(f"{where}: {error}", param=where) from None
    except FormatError as error:
        raise bad_request(f"{param}: {error}", param=param) from None


def _render(serving: Serving, prompt: Prompt, param: str) -> list[int]:
    try:
        return serving.chat.render(prompt)
    except PromptTooLong as error:
        raise serving.too_long(f"more than {error.at_least}", param) from None
    except FormatError as error:
        raise bad_request(f"{param}: {error}", param=param) from None


def _text_size(prompt: Prompt) -> int:
    """Characters that the messages say."""
    contents = [message.get("content") for message in prompt.messages]
    parts = [part.get("text") for content in contents if isinstance(content, list) for part in content]
    return sum(len(text) for text in [*parts, *contents] if isinstance(text, str))

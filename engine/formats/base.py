"""How a model is talked to: messages to a prompt, and what it says back to content, reasoning and tool calls.

Each format is one file. The endpoints know this interface only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from engine.grammar import GrammarSpec

Json = Mapping[str, Any]
ToolChoice = Literal["none", "auto", "required"] | str
"""A name of none of these is the function that must be called, given as `=name`."""


class FormatError(ValueError):
    """The messages cannot be turned into a prompt, or the model has no way to do what is asked; one line, for the
    client."""


class PromptTooLong(FormatError):
    """The prompt has more tokens than any context holds, as its length shows already."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the prompt has more than {at_least} tokens")
        self.at_least = at_least


@dataclass(frozen=True, slots=True)
class Pictures:
    """What stands in a prompt for its pictures."""

    mark: str
    """What templates write for each."""
    texts: Sequence[str]
    """What takes the mark's place, in the order of the messages: placeholders for all that the model sees of it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt is made of."""

    messages: Sequence[Json]
    """As the client sent them, validated."""
    tools: Sequence[Json] | None = None
    """In the chat endpoint's shape: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What else a template may read: chat_template_kwargs, documents, reasoning_effort."""
    pictures: Pictures | None = None
    """Of the parts of messages that are `{"type": "image"}`."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one tool call."""

    index: int
    arguments: str = ""
    """The next piece of its arguments, JSON text."""
    id: str | None = None
    """With the first piece only, as is the name."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What a few more tokens add to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, later: Piece) -> Piece:
        calls = list(self.calls)
        for call in later.calls:
            begun = calls.pop() if calls and calls[-1].index == call.index else None
            calls.append(call if begun is None else replace(begun, arguments=begun.arguments + call.arguments))
        return Piece(self.content + later.content, self.reasoning + later.reasoning, tuple(calls))


class Parser(Protocol):
    """Reads one answer as it comes. All pieces together do not depend on how the answer was cut."""

    def push(self, text: str, token_ids: Sequence[int]) -> Piece:
        """The next text and the tokens that count for it; text may come later than its tokens."""

    def end(self) -> Piece:
        """What was held back, when nothing will follow."""


class ChatFormat(Protocol):
    @property
    def keeps_special_tokens(self) -> bool:
        """Whether its parser must see special tokens as text; it takes them out itself."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, beside the model's EOS."""

    def render(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt. Raises FormatError. May take long: call it through `offload` for large bodies."""

    def parser(self, *, tools: Sequence[Json] | None, choice: ToolChoice, prompt_token_ids: Sequence[int]) -> Parser:
        """For one answer. Without tools, or with choice "none", tool calls are content. The prompt's end says whether
        the model is already within its thoughts."""

    def grammar(
        self,
        content: GrammarSpec | None,
        *,
        tools: Sequence[Json] | None,
        choice: ToolChoice,
        parallel: bool,
        prompt_token_ids: Sequence[int],
    ) -> GrammarSpec | None:
        """What the model's answer must look like from its first token on, thoughts, channels and calls included.

        `content` is what a client demands of the content (response_format, structured_outputs). With the choice
        "required" or of one function there must be calls, and no content. With "auto", calls stay possible in place of
        a constrained content. None if the model may say anything. Raises FormatError if the format has no calls and
        the choice is not "none", or if it cannot hold the model to this.
        """

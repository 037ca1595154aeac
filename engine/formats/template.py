"""Models that are talked to through their chat template: most of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.chat_template import ChatTemplateError
from engine.formats.base import FormatError, Json, Parser, Pictures, Piece, Prompt, PromptTooLong, ToolChoice
from engine.formats.calls import CallReader, CallSyntax, functions_for, new_call_id
from engine.formats.constraint import content_rule, thoughts_rules
from engine.formats.reasoning import CLOSE, OPEN, Thoughts, thoughts_begun, thoughts_over
from engine.grammar import MAX_SOURCE, GrammarSpec, lark_string
from engine.tokenizer import Tokenizer

MAX_PROMPT_END = 4096
"""Tokens in which thoughts that a prompt has begun are looked for."""


class TemplateFormat:
    """Text that the template makes, and answers in which thoughts and calls stand between marks."""

    def __init__(self, tokenizer: Tokenizer, *, calls: CallSyntax | None, thinks: bool, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._calls = calls
        self._thinks = thinks
        self._max_model_len = max_model_len
        marks = (calls.marks if calls else ()) + ((OPEN, CLOSE) if thinks else ())
        tokenizer.show(marks)

    @property
    def keeps_special_tokens(self) -> bool:
        return False

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset()

    def render(self, prompt: Prompt) -> list[int]:
        try:
            text = self._tokenizer.render_chat(
                [_with_thoughts(self._with_known_role(message)) for message in prompt.messages],
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                tools=prompt.tools,
                **prompt.variables,
            )
        except ChatTemplateError as error:
            raise FormatError(str(error)) from None
        if prompt.pictures is not None:
            text = _with_pictures(text, prompt.pictures)
        at_least = len(text) // self._tokenizer.max_characters_per_token
        if at_least > self._max_model_len:
            raise PromptTooLong(at_least)
        try:
            return self._tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)
        except ValueError as error:
            raise FormatError(str(error)) from None

    def _with_known_role(self, message: Json) -> Json:
        """Clients write `developer` for what most templates know as `system`, and would drop or take for a user's."""
        if message.get("role") != "developer" or "developer" in self._tokenizer.template_text:
            return message
        return {**message, "role": "system"}

    def parser(self, *, tools: Sequence[Json] | None, choice: ToolChoice, prompt_token_ids: Sequence[int]) -> Parser:
        thoughts = Thoughts(begun=thoughts_begun(self._prompt_end(prompt_token_ids))) if self._thinks else None
        calls = CallReader(self._calls, new_call_id) if self._calls and tools and choice != "none" else None
        return TextParser(thoughts, calls)

    def grammar(
        self,
        content: GrammarSpec | None,
        *,
        tools: Sequence[Json] | None,
        choice: ToolChoice,
        parallel: bool,
        prompt_token_ids: Sequence[int],
    ) -> GrammarSpec | None:
        may_call = bool(tools) and choice != "none"
        must_call = may_call and choice != "auto"
        if may_call and self._calls is None:
            raise FormatError(
                'this model has no known way to call tools: use tool_choice "none", or --tool-call-parser of the engine'
            )
        prompt_end = self._prompt_end(prompt_token_ids)
        may_think = self._thinks and not thoughts_over(prompt_end)
        if not must_call and (content is None or not (may_call or may_think)):
            return content
        rules = []
        if content is not None and not must_call:
            rules.append(content_rule(content))
        if tools and may_call and self._calls is not None:
            rules.append(self._calls.rules(functions_for(tools, choice), parallel=parallel, mark=self._mark))
        answer = "calls" if must_call else "(content | calls)" if may_call else "content"
        thoughts = ""
        if may_think:
            thoughts = "thoughts "
            rules.append(
                thoughts_rules(
                    begun=thoughts_begun(prompt_end),
                    closes_with_token=self._tokenizer.is_special(CLOSE),
                    mark=self._mark,
                )
            )
        source = "\n".join([f"start: {thoughts}{answer}", *rules]) + "\n"
        if len(source) > MAX_SOURCE:
            raise FormatError(f"the schemas have {len(source)} characters, at most {MAX_SOURCE} are possible")
        return GrammarSpec("lark", source, content.param if content is not None and not must_call else "tools")

    def _mark(self, mark: str) -> str:
        return mark if self._tokenizer.is_special(mark) else lark_string(mark)

    def _prompt_end(self, prompt_token_ids: Sequence[int]) -> str:
        """The answer's own beginning, if the prompt has it: no special token comes after."""
        return self._tokenizer.text_since_special(prompt_token_ids[-MAX_PROMPT_END:]) if self._thinks else ""


class TextParser:
    """Thoughts first, then content and calls."""

    def __init__(self, thoughts: Thoughts | None, calls: CallReader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def push(self, text: str, token_ids: Sequence[int]) -> Piece:
        reasoning, answer = self._thoughts.push(text) if self._thoughts else ("", text)
        piece = self._calls.push(answer) if self._calls else Piece(content=answer)
        return replace(piece, reasoning=reasoning)

    def end(self) -> Piece:
        reasoning, answer = self._thoughts.end() if self._thoughts else ("", "")
        if self._calls is None:
            return Piece(content=answer, reasoning=reasoning)
        return replace(self._calls.push(answer) + self._calls.end(), reasoning=reasoning)


def _with_pictures(text: str, pictures: Pictures) -> str:
    """The prompt with its pictures' placeholders. What the mark is in, besides, cannot be told from a picture."""
    between = text.split(pictures.mark)
    if len(between) - 1 != len(pictures.texts):
        raise FormatError(
            f"the prompt has {len(between) - 1} places for {len(pictures.texts)} pictures: the text must not hold "
            f"{pictures.mark}, and the chat template must show every picture"
        )
    pieces = [between[0]]
    for shown, after in zip(pictures.texts, between[1:], strict=True):
        pieces += [shown, after]
    return "".join(pieces)


def _with_thoughts(message: Json) -> Json:
    """A message whose thoughts templates find, under whichever of their two names they came."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thoughts, str):
        return message
    return {**message, "reasoning_content": thoughts, "reasoning": thoughts}

"""The format of GPT-OSS models: messages between special tokens, thoughts and calls told apart by their channels.

Prompts are written, and answers read, in the model's own vocabulary, whatever it is, so long as it has the special
tokens. openai-harmony, the reference, can write and read one vocabulary only, a file that it fetches when it is first
used; so it is what tests compare with, and nothing an engine needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime

from engine.formats.base import FormatError, Json, Parser, Prompt, PromptTooLong, ToolChoice
from engine.formats.calls import functions_for
from engine.formats.harmony_grammar import answer_grammar
from engine.formats.harmony_parser import HarmonyParser, Messages
from engine.formats.harmony_prompt import Marker, parts
from engine.grammar import GrammarSpec
from engine.tokenizer import Tokenizer


def has_markers(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary can part messages as this format does."""
    return all(tokenizer.is_special(marker) for marker in Marker)


def _today() -> date:
    return datetime.now(UTC).date()


class HarmonyFormat:
    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, today: Callable[[], date] = _today) -> None:
        """Raises FormatError if the vocabulary lacks a marker."""
        if missing := [marker for marker in Marker if not tokenizer.is_special(marker)]:
            raise FormatError(f"the vocabulary has no special token {' or '.join(missing)}")
        self._tokenizer = tokenizer
        self._max_length = max_model_len * tokenizer.max_characters_per_token
        self._today = today
        self._ids = {marker: id_ for marker in Marker if (id_ := tokenizer.token_id(marker)) is not None}
        self._markers = {id_: marker for marker, id_ in self._ids.items()}
        tokenizer.encode_ordinary("")  # its first time takes a second with a large vocabulary

    @property
    def keeps_special_tokens(self) -> bool:
        return True

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset((self._ids[Marker.RETURN], self._ids[Marker.CALL]))

    def render(self, prompt: Prompt) -> list[int]:
        told = parts(prompt, self._today())
        if (length := sum(map(len, told))) > self._max_length:
            raise PromptTooLong(length // self._tokenizer.max_characters_per_token)
        ids: list[int] = []
        try:
            for part in told:
                ids += [self._ids[part]] if isinstance(part, Marker) else self._tokenizer.encode_ordinary(part)
        except ValueError as error:
            raise FormatError(str(error)) from None
        return ids

    def parser(self, *, tools: Sequence[Json] | None, choice: ToolChoice, prompt_token_ids: Sequence[int]) -> Parser:
        functions = frozenset(str(function["name"]) for function in functions_for(tools or (), "auto"))
        messages = self._messages(prompt_token_ids, functions if choice != "none" else frozenset())
        return HarmonyParser(self._tokenizer, self._markers, messages)

    def grammar(
        self,
        content: GrammarSpec | None,
        *,
        tools: Sequence[Json] | None,
        choice: ToolChoice,
        parallel: bool,
        prompt_token_ids: Sequence[int],
    ) -> GrammarSpec | None:
        """Thoughts, perhaps, then content or one call: the marker that ends a call ends the answer."""
        functions = functions_for(tools, choice) if tools and choice != "none" else []
        must_call = bool(functions) and choice != "auto"
        if content is None and not must_call:
            return None
        within = self._messages(prompt_token_ids, frozenset()).within
        return answer_grammar(within, content=None if must_call else content, functions=functions)

    def _messages(self, prompt_token_ids: Sequence[int], functions: frozenset[str]) -> Messages:
        """Read up to the end of a prompt, from its last <|start|> on."""
        messages = Messages(functions)
        start = self._ids[Marker.START]
        begin = next((i for i in reversed(range(len(prompt_token_ids))) if prompt_token_ids[i] == start), None)
        if begin is not None:
            tail = prompt_token_ids[begin:]
            messages.begin([(self._markers.get(id_), self._tokenizer.token_str(id_)) for id_ in tail])
        return messages

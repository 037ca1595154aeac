"""Sampling fields that take more than the body to check: the tokenizer, a header, the engine's settings."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.wire.openai import bad_request
from engine.api.call import Call
from engine.api.context import Serving
from engine.api.offload import offload
from engine.grammar import GrammarError, GrammarSpec, Matcher
from engine.tokenizer import Tokenizer

PRIORITY_HEADER = "X-Vllm-Priority"
_INT64 = 2**63
_MAX_DIGITS = 20


def priority_of(call: Call, in_body: int | None) -> int:
    """The header's, or else the body's. Raises APIError 400."""
    header = call.http.headers.get(PRIORITY_HEADER)
    value = in_body or 0
    if header is not None:
        digits = header.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
            raise bad_request(f"{PRIORITY_HEADER}: a whole number expected, got {header[:20]!r}", param="priority")
        value = int(header)
        if not -_INT64 <= value < _INT64:
            raise bad_request(f"{PRIORITY_HEADER}: too large a number, got {header[:20]}", param="priority")
    if value and not call.serving.priority_scheduling:
        raise bad_request(
            f"priority: needs priority scheduling, which this engine is not started with "
            f"(--scheduling-policy priority), got {value}",
            param="priority",
        )
    return value


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell these words, at the beginning of a text and after a space. Raises APIError 400."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        try:
            bare, spaced = (
                tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
        except ValueError as error:
            raise bad_request(f"bad_words: {error}", param="bad_words") from None
        found[bare] = None
        # One that merely begins with a token for the space would forbid what the other spells already.
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    return tuple(sequence for sequence in found if sequence)


async def matchers_for(serving: Serving, grammar: GrammarSpec | None, count: int) -> list[Matcher | None]:
    """One for each of so many answers. Raises APIError 400."""
    if grammar is None:
        return [None] * count
    try:
        return [*await offload(True, serving.grammars.compile, grammar, count)]
    except GrammarError as error:
        raise bad_request(f"{grammar.param}: {error}", param=grammar.param) from None

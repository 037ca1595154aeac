"""Grammars compiled for one model's tokens, by llguidance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.grammar import MAX_SOURCE, GrammarError, GrammarSpec, Matcher, lark_string, shortened
from engine.lark import as_lark
from engine.tokenizer import Tokenizer

MAX_CACHED = 16
"""Compiled grammars kept; the least recently used goes first."""
ANY_OBJECT = '{"type": "object"}'


class Grammars:
    """Compiles constraints into matchers, for any thread; the vocabulary is laid out for the first one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the width of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def compile(self, grammar: GrammarSpec, count: int = 1) -> list[Matcher]:
        """That many matchers at their beginning. Raises GrammarError."""
        compiled = self._compiled(grammar)
        return [GrammarMatcher(compiled.deep_copy()) for _ in range(count)]

    def _compiled(self, grammar: GrammarSpec) -> LLMatcher:
        if len(grammar.source) > MAX_SOURCE:
            raise GrammarError(f"more than {MAX_SOURCE} characters, with what is put around it")
        key = (grammar.kind, grammar.source)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary, _source(grammar), log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # what nothing can match shows now, not when the answer is under way
        if matcher.is_error():
            raise GrammarError(_complaint(matcher))
        with self._lock:
            self._cache[key] = matcher
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Raises GrammarError for a model whose answers cannot be held to anything."""
        ends = sorted(self._tokenizer.eos_token_ids)
        if not ends:
            raise GrammarError("this model has no token that ends a text")
        size = max(self._vocab_size, self._tokenizer.max_token_id + 1)
        try:
            return LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise GrammarError(f"this model's tokens do not allow it: {shortened(str(error))}") from None


class GrammarMatcher:
    """A Matcher by llguidance, which tells of errors instead of raising them."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.failure: str | None = None

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def bitmask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.failure = f"its grammar cannot be followed any further: {_complaint(self._matcher)}"


def _source(grammar: GrammarSpec) -> str:
    """Raises GrammarError."""
    try:
        match grammar.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(grammar.source)
            case "json_object":
                return LLMatcher.grammar_from_json_schema(ANY_OBJECT)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.source)
            case "choice":
                return LLMatcher.grammar_from_lark(
                    "start: " + " | ".join(map(lark_string, orjson.loads(grammar.source)))
                )
            case "lark":
                return LLMatcher.grammar_from_lark(as_lark(grammar.source))
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(shortened(str(error))) from None


def _limits() -> LLParserLimits:
    """What one grammar may cost: well under a second to compile, some 10 ms a token, some 100 MB."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _complaint(matcher: LLMatcher) -> str:
    return shortened(matcher.get_error().removesuffix("<non-verbose/>"))

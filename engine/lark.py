"""A client's grammar in Lark's notation, whichever of the two it came in."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import any_to_lark

from engine.grammar import GrammarError, shortened

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def as_lark(source: str) -> str:
    """Lark as it is; llama.cpp's notation, which clients of vLLM use too, translated. Raises GrammarError."""
    if not _GBNF_RULE.search(source):
        return source
    try:
        return any_to_lark(source)
    except Exception as error:  # a parser that gives up in many ways, on recursion and missing characters too
        raise GrammarError(shortened(f"neither Lark nor GBNF: {error}")) from None

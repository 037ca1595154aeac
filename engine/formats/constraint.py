"""Grammars for whole answers, in Lark's notation: around what a client demands, the format's own syntax."""

from __future__ import annotations

import json
import re

from engine.formats.calls import Mark
from engine.formats.reasoning import CLOSE, OPEN
from engine.grammar import GrammarSpec, lark_string
from engine.lark import as_lark

_SLASH_OR_ESCAPE = re.compile(r"\\.|/", re.DOTALL)


def content_rule(content: GrammarSpec) -> str:
    """The rule `content`. Raises GrammarError."""
    match content.kind:
        case "json_schema":
            return f"content: %json {content.source}"
        case "json_object":
            return 'content: %json {"type": "object"}'
        case "regex":
            return f"content: /{_escaped(content.source)}/"
        case "choice":
            return "content: " + " | ".join(map(lark_string, json.loads(content.source)))
        case "lark":
            return f"content: %lark {{\n{as_lark(content.source)}\n}}"


def thoughts_rules(*, begun: bool, closes_with_token: bool, mark: Mark) -> str:
    """The rule `thoughts`: those that the prompt has begun, or that the answer may begin with."""
    # A special token is no text, so text that goes on until then needs no look at what it says.
    rest = f"/(?s:.*)/ {mark(CLOSE)}" if closes_with_token else "rest"
    lines = [f"thoughts: {rest} /\\s{{0,4}}/" if begun else f"thoughts: ({mark(OPEN)} {rest} /\\s{{0,4}}/)?"]
    if not closes_with_token:
        lines.append(r"rest[lazy]: /(?s:.*?)<\/think>/")
    return "\n".join(lines)


def _escaped(pattern: str) -> str:
    """A regular expression for between slashes, on one line."""
    escaped = _SLASH_OR_ESCAPE.sub(lambda found: r"\/" if found[0] == "/" else found[0], pattern)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")

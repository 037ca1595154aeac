"""What a Harmony answer must look like, in Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engine.formats.base import FormatError
from engine.formats.constraint import content_rule
from engine.grammar import GrammarSpec, lark_string

Within = Literal["header", "content", "reasoning", "nothing"]
"""Where an answer begins: usually in the header of the message that the prompt has begun, after `assistant`."""

# Special tokens are no text, so text that goes on until the next one needs no look at what it says.
_THOUGHTS = """\
thoughts: (<|channel|> "analysis" <|message|> rest)*
rest: /(?s:.*)/ <|end|> <|start|> "assistant"
"""


def answer_grammar(
    within: Within, *, content: GrammarSpec | None, functions: Sequence[Mapping[str, Any]]
) -> GrammarSpec:
    """For this content, or a call of one of the functions; at least one of them is given. Raises FormatError."""
    if within == "content":
        if content is None:
            raise FormatError("a message that already has content cannot become a call of a tool")
        return GrammarSpec("lark", f"start: content <|return|>\n{content_rule(content)}\n", content.param)
    answers = (["final"] if content else []) + (["call"] if functions else [])
    begin = {"header": "", "reasoning": "rest ", "nothing": '<|start|> "assistant" '}[within]
    rules = [f"start: {begin}thoughts ({' | '.join(answers)})", _THOUGHTS]
    if content is not None:
        rules += ['final: <|channel|> "final" <|message|> content <|return|>', content_rule(content)]
    if functions:
        rules += _call_rules(functions)
    return GrammarSpec("lark", "\n".join(rules) + "\n", content.param if content is not None else "tools")


def _call_rules(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    rules = [f'call: <|channel|> "commentary to=functions." ({names}) <|call|>']
    for index, function in enumerate(functions):
        schema = json.dumps(function.get("parameters") or {"type": "object"}, ensure_ascii=False)
        header = f'{lark_string(function["name"])} " "? (<|constrain|> "json")? <|message|>'
        rules += [f"call_{index}: {header} arguments_{index}", f"arguments_{index}: %json {schema}"]
    return rules

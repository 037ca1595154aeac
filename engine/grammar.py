"""Structured output: what an answer must look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A request's constraint on its output, as yet unchecked."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    source: str
    """A JSON schema (as text), nothing, a regular expression, a JSON array of strings, or a grammar in Lark's notation."""

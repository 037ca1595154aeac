"""Structured output as clients ask for it: `structured_outputs`, and the `guided_*` fields it replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import OFF, Body
from engine.grammar import GrammarSpec

MAX_GRAMMAR_LENGTH = 1 << 17
"""Characters of a schema, a pattern or a grammar; of all choices together."""
MAX_CHOICES = 1024
_UNSUPPORTED = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag")

Schema = str | dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True)]


class StructuredOutputs(Body):
    """What the answer must look like: one of these."""

    schema_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: object) -> object:
        for name in _UNSUPPORTED:
            if isinstance(value, Mapping) and value.get(name) not in OFF:
                raise ValueError(f"{name} is not supported by this engine, leave it out")
        return value


class StructuredBody(Body):
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """What the answer must look like, if anything. Raises APIError 400. Bodies that have fields of their own for
        this add them."""
        new = self.structured_outputs
        given: dict[str, GrammarSpec | None] = {
            "guided_json": json_schema(self.guided_json, "guided_json"),
            "guided_regex": regex(self.guided_regex, "guided_regex"),
            "guided_choice": choice(self.guided_choice, "guided_choice"),
            "guided_grammar": lark(self.guided_grammar, "guided_grammar"),
        }
        if new is not None:
            given |= {
                "structured_outputs.json": json_schema(new.schema_, "structured_outputs.json"),
                "structured_outputs.regex": regex(new.regex, "structured_outputs.regex"),
                "structured_outputs.choice": choice(new.choice, "structured_outputs.choice"),
                "structured_outputs.grammar": lark(new.grammar, "structured_outputs.grammar"),
                "structured_outputs.json_object": GrammarSpec("json_object", "") if new.json_object else None,
            }
        found = {name: grammar for name, grammar in given.items() if grammar is not None}
        if len(found) > 1:
            param = list(found)[1].split(".")[0]
            raise bad_request(f"{param}: only one constraint is possible, got {' and '.join(found)}", param=param)
        if new is not None and not found:
            param = "structured_outputs"
            raise bad_request(f"{param}: one of json, regex, choice, grammar and json_object expected", param=param)
        return next(iter(found.values()), None)


def json_schema(schema: Schema | bool | None, param: str) -> GrammarSpec | None:
    """A constraint from a JSON schema, as an object or as text. Raises APIError 400, as do the others here."""
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return _bounded(GrammarSpec("json_schema", text, param))


def regex(pattern: str | None, param: str) -> GrammarSpec | None:
    return None if pattern is None else _bounded(GrammarSpec("regex", pattern, param))


def lark(grammar: str | None, param: str) -> GrammarSpec | None:
    return None if grammar is None else _bounded(GrammarSpec("lark", grammar, param))


def choice(strings: list[str] | None, param: str) -> GrammarSpec | None:
    if strings is None:
        return None
    if not 0 < len(strings) <= MAX_CHOICES:
        raise bad_request(f"{param}: 1 to {MAX_CHOICES} strings expected, got {len(strings)}", param=param)
    if "" in strings:
        raise bad_request(f"{param}: a choice cannot be empty", param=param)
    return _bounded(GrammarSpec("choice", orjson.dumps(strings).decode(), param))


def _bounded(grammar: GrammarSpec) -> GrammarSpec:
    size = len(grammar.source)
    if not 0 < size <= MAX_GRAMMAR_LENGTH:
        raise bad_request(
            f"{grammar.param}: 1 to {MAX_GRAMMAR_LENGTH} characters expected, got {size}", param=grammar.param
        )
    return grammar

"""`response_format`: OpenAI's way to ask for JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import Body
from engine.api.bodies.structured import json_schema
from engine.grammar import GrammarSpec


class NamedSchema(Body):
    name: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None
    """Taken, and not needed: an answer always follows its schema."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('type "json_schema" needs json_schema')
        return self


def response_grammar(wanted: ResponseFormat | None, beside: GrammarSpec | None) -> GrammarSpec | None:
    """The constraint this format stands for, or the one given `beside` it. Raises APIError 400 if there are both."""
    if wanted is None or wanted.type == "text":
        return beside
    if beside is not None:
        raise bad_request(
            f"response_format: only one constraint is possible, got {beside.param} beside it", param="response_format"
        )
    if wanted.json_schema is None or wanted.type == "json_object":
        return GrammarSpec("json_object", "", "response_format")
    return json_schema(wanted.json_schema.schema_, "response_format")

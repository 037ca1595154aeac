"""How both programs declare their API: an OpenAPI 3.1 document, made from one entry per route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Literal

Json = dict[str, Any]

PATH: Final = "/openapi.json"

ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ERROR_ANSWER: Final[Json] = {
    "description": "What is wrong.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
REQUEST_ID_HEADER: Final[Json] = {"description": "Names the request in logs.", "schema": {"type": "string"}}
REQUEST_ID: Final[Json] = {"name": "X-Request-Id", "in": "header"} | REQUEST_ID_HEADER

OBJECT: Final[Json] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one route takes and answers."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: Json | None = None
    """Schema of the JSON it takes."""
    answer: Json | None = None
    """Schema of the JSON it answers; None: it answers no JSON."""
    streams: bool = False
    """Whether it answers events instead if asked with `stream`."""
    unready: Json | None = None
    """Schema of the JSON of a 503, where that is no error."""
    parameters: Sequence[Json] = ()
    """Beside those in the path, and X-Request-Id."""

    def to_json(self) -> Json:
        content: Json = {} if self.answer is None else {"application/json": {"schema": self.answer}}
        if self.streams:
            content["text/event-stream"] = {}
        good = {"description": "The answer.", "headers": {"X-Request-Id": REQUEST_ID_HEADER}}
        told: Json = {
            "summary": self.summary,
            "parameters": [*map(_in_path, names_in(self.path)), REQUEST_ID, *self.parameters],
            "responses": {"200": good | ({"content": content} if content else {})},
        }
        told["responses"] |= {"4XX": _ERROR_ANSWER, "5XX": _ERROR_ANSWER}
        if self.unready is not None:
            told["responses"]["503"] = good | {"content": {"application/json": {"schema": self.unready}}}
        if self.body is not None:
            told["requestBody"] = {"required": True, "content": {"application/json": {"schema": self.body}}}
        return told


def kind(name: str) -> Json:
    """Schema of an object that says what it is, as OpenAI's do."""
    return {"type": "object", "required": ["object"], "properties": {"object": {"const": name}}}


def document(title: str, operations: Sequence[Operation], schemas: Mapping[str, Json]) -> Json:
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = operation.to_json()
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": _version()},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR, **schemas}},
    }


def names_in(path: str) -> list[str]:
    return [part.removeprefix("{").removesuffix("}") for part in path.split("/") if part.startswith("{")]


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _version() -> str:
    try:
        return version("backhaul")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"

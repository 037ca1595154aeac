"""Functions as Harmony writes them: a namespace of TypeScript types, one for each function, with comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from engine.formats.base import FormatError, Json

_TYPES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_INDENT = "    "


def namespace(tools: Sequence[Json]) -> str:
    """The section of the developer message that says what can be called."""
    functions = "\n\n".join(_function(index, tool) for index, tool in enumerate(tools))
    return f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{functions}\n\n}} // namespace functions"


def function_name(index: int, tool: Json) -> str:
    """Raises FormatError for a tool that is not a function."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise FormatError(f"tools[{index}]: a function with a name expected")
    return name


def _function(index: int, tool: Json) -> str:
    name = function_name(index, tool)
    function = tool["function"]
    parameters = function.get("parameters")
    takes_any = isinstance(parameters, Mapping) and bool(parameters.get("properties"))
    argument = f"_: {_type(parameters, '')}" if takes_any else ""
    return "".join(_comment(function.get("description"), "")) + f"type {name} = ({argument}) => any;"


def _type(schema: object, indent: str) -> str:
    """The type of what a JSON schema describes; any for what this notation has no words for."""
    return " | ".join(dict.fromkeys(_alternatives(schema, indent)))


def _alternatives(schema: object, indent: str) -> list[str]:
    if not isinstance(schema, Mapping):
        return ["any"]
    for variants in (schema.get("oneOf"), schema.get("anyOf")):
        if isinstance(variants, list) and variants:
            return [kind for variant in variants for kind in _alternatives(variant, indent)]
    kind, values = schema.get("type"), schema.get("enum")
    if isinstance(kind, list) and kind:
        return [one for name in kind for one in _alternatives({**schema, "type": name}, indent)]
    if isinstance(values, list) and values:
        return [_json(value) for value in values]
    if kind == "object":
        return [_object(schema, indent)]
    if kind == "array":
        return [_array(schema, indent)]
    return [_TYPES.get(kind, "any") if isinstance(kind, str) else "any"]


def _array(schema: Mapping[str, Any], indent: str) -> str:
    element = _alternatives(schema.get("items"), indent)
    if element == ["any"]:
        return "Array<any>"
    return f"{element[0]}[]" if len(element) == 1 else f"({' | '.join(element)})[]"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    properties, required = schema.get("properties"), schema.get("required")
    fields = properties.items() if isinstance(properties, Mapping) else ()
    needed = required if isinstance(required, list) else []
    lines = "".join(line for name, field in fields for line in _field(name, field, indent, needed=name in needed))
    return "".join(_comment(schema.get("description"), indent)) + f"{{\n{lines}{indent}}}"


def _field(name: str, schema: object, indent: str, *, needed: bool) -> Iterator[str]:
    about: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    if isinstance(about.get("title"), str):
        yield from _comment(about["title"], indent)
        yield f"{indent}//\n"
    yield from _comment(about.get("description"), indent)
    if isinstance(examples := about.get("examples"), list) and examples:
        yield f"{indent}// Examples:\n"
        yield from (f"{indent}// - {_json(example)}\n" for example in examples)
    kind = _type(schema, indent + _INDENT)
    if about.get("nullable") is True:
        kind = f"{kind} | null"
    told = ""
    if "default" in about:
        default = about["default"]
        told = f" // default: {default if isinstance(default, str) and about.get('enum') else _json(default)}"
    yield f"{indent}{name}{'' if needed else '?'}: {kind},{told}\n"


def _comment(text: object, indent: str) -> Iterator[str]:
    for line in text.splitlines() if isinstance(text, str) else ():
        yield f"{indent}// {line}\n"


def _json(value: object) -> str:
    return orjson.dumps(value).decode()

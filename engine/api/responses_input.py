"""The input items of a responses request as the messages of a chat, which is what models are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from connectors.wire.openai import APIError, bad_request
from engine.api.bodies.chat import MAX_PARTS, MAX_PARTS_IN_ALL, RESERVED
from engine.api.bodies.media import PicturePart
from engine.api.bodies.responses import ResponsesPrompt
from engine.formats.base import Prompt

Json = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Parts that are text, and where they have it."""


def prompt_of(body: ResponsesPrompt) -> Prompt:
    """Raises APIError 400 naming the part of an item that cannot be understood."""
    variables = dict(body.chat_template_kwargs or {})
    if reserved := RESERVED & variables.keys():
        raise _bad(f"chat_template_kwargs.{min(reserved)}", "cannot be set there")
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables["reasoning_effort"] = body.reasoning.effort
    tools = [tool.for_chat for tool in body.tools] if body.tools else None
    return Prompt(list(_messages(body)), tools, variables=variables)


def pictures_of(body: ResponsesPrompt) -> list[PicturePart]:
    """Of an input that `prompt_of` has understood, in the order in which its messages show them."""
    parts = (
        part
        for item in (body.input if isinstance(body.input, list) else ())
        for key in ("content", "output")
        if isinstance(item.get(key), list)
        for part in item[key]
    )
    return [PicturePart(type="image_url", image_url=part["image_url"]) for part in parts if _is_picture(part)]


def _messages(body: ResponsesPrompt) -> Iterator[Json]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    _check_parts(body.input)
    turn = _Turn()
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") == "assistant":
            yield from turn.say(_text(item.get("content"), f"{where}.content"))
        elif kind == "reasoning":
            yield from turn.think(_thoughts(item, where))
        elif kind == "function_call":
            turn.call(_call(item, where))
        elif kind == "message":
            yield from turn.end()
            yield {"role": _role(item, where), "content": _content(item.get("content"), f"{where}.content")}
        elif kind == "function_call_output":
            yield from turn.end()
            output = _content(item.get("output"), f"{where}.output")
            yield {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output}
        else:
            raise _bad(f"{where}.type", f"this engine knows no such item, got {str(kind)[:40]!r}")
    yield from turn.end()


class _Turn:
    """What the model thought, said and called in one go: several items, one message."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[Json] = []

    def think(self, thoughts: str) -> Iterator[Json]:
        if self._text is not None or self._calls:
            yield from self.end()
        if thoughts:
            self._thoughts.append(thoughts)

    def say(self, text: str) -> Iterator[Json]:
        if self._text is not None or self._calls:
            yield from self.end()
        self._text = text

    def call(self, call: Json) -> None:
        self._calls.append(call)

    def end(self) -> Iterator[Json]:
        """The message, if there is any. Thoughts alone are none: nothing came of them."""
        if self._text is not None or self._calls:
            message: Json = {"role": "assistant", "content": self._text or ""}
            if self._thoughts:
                message["reasoning_content"] = "\n".join(self._thoughts)
            if self._calls:
                message["tool_calls"] = self._calls
            yield message
        self._thoughts, self._text, self._calls = [], None, []


def _role(item: Mapping[str, Any], where: str) -> str:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _bad(f"{where}.role", f"one of {', '.join(ROLES)} expected, got {str(role)[:40]!r}")
    return role


def _call(item: Mapping[str, Any], where: str) -> Json:
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    """What a reasoning item says, or its summary if that is all there is."""
    key = "content" if item.get("content") else "summary"
    parts = item.get(key) or []
    if not isinstance(parts, list):
        raise _bad(f"{where}.{key}", "a list of parts expected")
    return "\n".join(
        _string(part if isinstance(part, dict) else {}, "text", f"{where}.{key}[{index}]")
        for index, part in enumerate(parts)
    )


def _text(content: object, where: str) -> str:
    return content if isinstance(content, str) else "".join(_parts(content, where))


def _content(content: object, where: str) -> str | list[Json]:
    """Several parts stay what they are: how they are put together is the format's affair."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and any(map(_is_picture, content)):
        return [_shown(part, f"{where}[{index}]") for index, part in enumerate(content)]
    texts = list(_parts(content, where))
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def _is_picture(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _shown(part: Json, where: str) -> Json:
    """A part of a message with pictures, as a chat has it."""
    if not _is_picture(part):
        return {"type": "text", "text": "".join(_parts([part], where.rpartition("[")[0]))}
    if part.get("file_id") is not None:
        raise _bad(f"{where}.file_id", "this engine keeps no files, send the picture as image_url")
    _string(part, "image_url", where)
    return {"type": "image"}


def _parts(content: object, where: str) -> Iterator[str]:
    if not isinstance(content, list):
        raise _bad(where, "a string or a list of content parts expected")
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise _bad(f"{at}.type", f"this engine takes only text here, got {str(kind)[:40]!r}")
        yield _string(part, _TEXT_PARTS[kind], at)


def _check_parts(items: list[Json]) -> None:
    """Refuse what is hopelessly much before any of it is looked at."""
    in_all = 0
    for index, item in enumerate(items):
        for key in ("content", "output", "summary"):
            size = len(item[key]) if isinstance(item.get(key), list) else 0
            if size > MAX_PARTS:
                raise _bad(f"input[{index}].{key}", f"at most {MAX_PARTS} parts are possible, got {size}")
            in_all += size
    if in_all > MAX_PARTS_IN_ALL:
        raise _bad("input", f"at most {MAX_PARTS_IN_ALL} content parts are possible in all, got {in_all}")


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _bad(f"{where}.{key}", "a string expected" if key in item else "required, but missing")
    return value


def _bad(param: str, message: str) -> APIError:
    return bad_request(f"{param}: {message}", param=param)

"""A conversation as the text and the markers of a Harmony prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from enum import StrEnum

import orjson

from engine.formats.base import FormatError, Json, Prompt
from engine.formats.harmony_tools import namespace

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_KNOWLEDGE_CUTOFF = "2024-06"
_EFFORTS = ("low", "medium", "high")
_INSTRUCTING = ("system", "developer")


class Marker(StrEnum):
    """The special tokens around text."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"


Part = Marker | str
"""What is no Marker is text, whatever it spells."""


def parts(prompt: Prompt, today: date) -> list[Part]:
    """Raises FormatError."""
    told = list(_conversation(prompt, today))
    if prompt.continue_final_message:
        told.pop()  # the marker that ends the message
    elif prompt.add_generation_prompt:
        told += [Marker.START, "assistant"]
    return told


def _conversation(prompt: Prompt, today: date) -> Iterator[Part]:
    tools = prompt.tools or ()
    yield from _message("system", _system(prompt, today, with_tools=bool(tools)))
    messages = list(enumerate(prompt.messages))
    leading = 0
    while leading < len(messages) and messages[leading][1].get("role") in _INSTRUCTING:
        leading += 1
    instructions = "\n\n".join(_text(index, message) for index, message in messages[:leading])
    if instructions or tools:
        yield from _message("developer", _developer(instructions, tools))
    names: dict[str, str] = {}  # of the functions, by the ids of the calls
    answered = _last_answer(prompt)
    for index, message in messages[leading:]:
        match message.get("role"):
            case "user":
                yield from _message("user", _text(index, message))
            case "assistant":
                yield from _assistant(index, message, names, with_thoughts=index > answered)
            case "tool":
                yield from _tool(index, message, names)
            case "system" | "developer":
                yield from _message("developer", _developer(_text(index, message), ()))
            case other:
                roles = "system, developer, user, assistant or tool"
                raise FormatError(f"messages[{index}].role: {roles} expected, got {str(other)[:40]!r}")


def _message(header: str, content: str, *, channel: str = "", end: Marker = Marker.END) -> tuple[Part, ...]:
    said: tuple[Part, ...] = (Marker.CHANNEL, channel) if channel else ()
    return (Marker.START, header, *said, Marker.MESSAGE, content, end)


def _system(prompt: Prompt, today: date, *, with_tools: bool) -> str:
    effort = prompt.variables.get("reasoning_effort") or "medium"
    if effort not in _EFFORTS:
        raise FormatError(f"reasoning_effort: low, medium or high expected, got {str(effort)[:40]!r}")
    identity = prompt.variables.get("model_identity", IDENTITY)
    if not isinstance(identity, str):
        raise FormatError("model_identity: a string expected")
    calls = "\nCalls to these tools must go to the commentary channel: 'functions'." if with_tools else ""
    return (
        f"{identity}\nKnowledge cutoff: {_KNOWLEDGE_CUTOFF}\nCurrent date: {today.isoformat()}\n\n"
        f"Reasoning: {effort}\n\n"
        f"# Valid channels: analysis, commentary, final. Channel must be included for every message.{calls}"
    )


def _developer(instructions: str, tools: Sequence[Json]) -> str:
    sections = ["# Instructions", instructions] if instructions else []
    return "\n\n".join([*sections, namespace(tools)] if tools else sections)


def _assistant(index: int, message: Json, names: dict[str, str], *, with_thoughts: bool) -> Iterator[Part]:
    content, calls = _text(index, message), message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise FormatError(f"messages[{index}].tool_calls: a list expected")
    thoughts = message.get("reasoning") or message.get("reasoning_content")
    if with_thoughts and isinstance(thoughts, str):
        yield from _message("assistant", thoughts, channel="analysis")
    if content or not (calls or thoughts):
        yield from _message("assistant", content, channel="commentary" if calls else "final")
    for number, call in enumerate(calls):
        name, arguments = _call(f"messages[{index}].tool_calls[{number}]", call)
        names[str(call.get("id"))] = name
        yield from (Marker.START, f"assistant to=functions.{name}", Marker.CHANNEL, "commentary ")
        yield from (Marker.CONSTRAIN, "json", Marker.MESSAGE, arguments, Marker.CALL)


def _call(where: str, call: object) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise FormatError(f"{where}: a call of a function with a name expected")
    arguments = function.get("arguments", "{}")
    return name, arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def _tool(index: int, message: Json, names: Mapping[str, str]) -> Iterator[Part]:
    name = names.get(str(message.get("tool_call_id"))) or message.get("name")
    if not isinstance(name, str):
        raise FormatError(f"messages[{index}].tool_call_id: no call before it has this id")
    return iter(_message(f"functions.{name} to=assistant", _text(index, message), channel="commentary"))


def _last_answer(prompt: Prompt) -> int:
    """The last message with a final answer: thoughts up to it are told no more, those since lead to the next one."""
    done = prompt.messages[:-1] if prompt.continue_final_message else prompt.messages
    for index in reversed(range(len(done))):
        message = done[index]
        if message.get("role") == "assistant" and message.get("content") and not message.get("tool_calls"):
            return index
    return -1


def _text(index: int, message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "\n".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise FormatError(f"messages[{index}].content: text expected")
    return content or ""

"""The items of the responses endpoint as chat messages: what makes a conversation the same one in either's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Message = dict[str, Any]

_TEXT: Final = ("input_text", "output_text", "text", "refusal")
_NOT_SAID: Final = ("reasoning", "item_reference")


def history_of(body: Mapping[str, Any]) -> list[Message] | None:
    """The messages of a request, or None if they cannot be told: it goes on from what some engine may have stored."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return None
    if body.get("previous_response_id") is not None or any(item.get("type") == "item_reference" for item in items):
        return None
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    return [*system, *messages_of(items)]


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """What an assistant says and the functions it calls in one go are one message, as they are in a chat."""
    messages: list[Message] = []
    for item in items:
        message = _message(item)
        if message is None:
            continue
        if messages and message["role"] == messages[-1]["role"] == "assistant":
            _join(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any]) -> Message | None:
    kind = item.get("type", "message")
    if kind in _NOT_SAID:
        return None
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": _content(item.get("output"))}
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content")), "tool_calls": []}
    return {"role": kind, "content": [dict(item)]}  # what we do not know stays what it is


def _content(content: object) -> object:
    if not isinstance(content, list):
        return content
    parts = [
        {"type": "text", "text": part.get("text", part.get("refusal"))}
        if isinstance(part, dict) and part.get("type") in _TEXT
        else part
        for part in content
    ]
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
        return "".join(texts)
    return parts


def _join(first: Message, second: Message) -> None:
    said = [text for text in (first.get("content"), second.get("content")) if text]
    if all(isinstance(text, str) for text in said):
        first["content"] = "".join(said)
    else:
        first["content"] = [part for text in said for part in (text if isinstance(text, list) else [text])]
    first["tool_calls"] = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]

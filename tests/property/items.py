"""A chat's messages and tools in the words of the responses endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def items_of(messages: Sequence[Json]) -> list[Json]:
    """What an assistant thought is an item of its own, before what it said."""
    items: list[Json] = []
    for message in messages:
        if thoughts := message.get("reasoning_content"):
            items.append(
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thoughts}]}
            )
        items.append({"type": "message", "role": message["role"], "content": _content(message)})
    return items


def functions_of(tools: Sequence[Json]) -> list[Json]:
    return [{"type": "function", **tool["function"]} for tool in tools]


def _content(message: Json) -> object:
    content = message["content"]
    if isinstance(content, str):
        return content
    kind = "output_text" if message["role"] == "assistant" else "input_text"
    return [{"type": kind, "text": part["text"]} for part in content]

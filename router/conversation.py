"""Which conversation a request belongs to.

A conversation is *named* by the client (body `conversation_id`, header `X-Conversation-Id` or `X-Session-Id`), or
found by its content: a chain of digests over the messages. After a turn the record is filed under the digest of the
history plus the answer just given; the next request's history ends in that answer, so it finds the record.

Either way the key is a digest over tenant, model and cache salt too, so that nobody finds what is another's.
Finding a record proves nothing about the next prompt: before KV is reused the token ids are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import orjson

from connectors.wire.openai import APIError, bad_request
from router import jsontext

KEY_PREFIX: Final = "backhaul:conversation:2:"
MAX_NAME_LENGTH: Final = 512
NAME_HEADERS: Final = ("X-Conversation-Id", "X-Session-Id")

_DIGEST_BYTES: Final = 16
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_OPENING_ROLES: Final = ("system", "developer")
_THINK_OPEN: Final = "<think>"
_THINK_CLOSE: Final = "</think>"


@dataclass(slots=True)
class Scope:
    """Whose conversations, of which model: part of every key."""

    tenant: str
    model: str
    cache_salt: str | None

    def digest(self, kind: str) -> bytes:
        return _digest(jsontext.dumps([kind, self.tenant, self.model, self.cache_salt]))


@dataclass(slots=True)
class Conversation:
    """Where the record of the last turn is found, and where that of this turn goes."""

    find: str | None
    """Store key; None when there can be no earlier turn, or none that could be told."""
    named: bool
    history: bytes | None
    """Digest of an unnamed conversation's messages so far."""
    model: str = ""
    opening: Mapping[str, Any] | None = None
    """The system message it begins with, which others may begin with too."""

    def prefix(self) -> bytes | None:
        """A digest of how the prompt begins, if others may begin so: where engines have it in their caches, whoever
        is asking."""
        if self.opening is None:
            return None
        return _digest(self.model.encode(errors="surrogatepass") + b"\0" + _canonical(self.opening))

    @property
    def may_be_found(self) -> bool:
        """Whether a later request can belong to it."""
        return self.named or self.history is not None

    @property
    def goes_by_content(self) -> bool:
        """Whether this turn's record will be found by its answer."""
        return self.history is not None

    def file_under(self, answer: Mapping[str, Any] | None) -> str | None:
        """The store key for this turn's record, given the assistant message it produced."""
        if self.named:
            return self.find
        if self.history is None or answer is None:
            return None
        try:
            return KEY_PREFIX + _digest(self.history + _canonical(answer)).hex()
        except APIError:  # an engine may write what cannot be written again, and no client could send it back
            return None


def identify(scope: Scope, name: str | None, messages: object) -> Conversation:
    """The conversation of a request; `messages` is its history if it is a chat, as yet unchecked.

    A name out of a header may hold surrogates, for bytes that are no UTF-8.
    """
    is_chat = isinstance(messages, list) and bool(messages) and all(isinstance(m, dict) for m in messages)
    first = messages[0] if is_chat and isinstance(messages, list) else {}
    opening = first if first.get("role") in _OPENING_ROLES else None
    if name is not None:
        digest = _digest(scope.digest("name") + name.encode(errors="surrogatepass"))
        return Conversation(KEY_PREFIX + digest.hex(), True, None, scope.model, opening)
    if not is_chat or not isinstance(messages, list):
        return Conversation(None, False, None)
    chain = scope.digest("messages")
    last_answer: bytes | None = None
    for message in messages:
        chain = _digest(chain + _canonical(message))
        if message.get("role") == "assistant":
            last_answer = chain
    return Conversation(
        None if last_answer is None else KEY_PREFIX + last_answer.hex(), False, chain, scope.model, opening
    )


def name_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The name the client gives the conversation; the body's goes before the headers'."""
    name = body.get("conversation_id")
    if name is None:
        for header in NAME_HEADERS:
            if name := headers.get(header):
                break
    if name is None or name == "":
        return None
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        raise bad_request(f"A string of at most {MAX_NAME_LENGTH} characters expected.", param="conversation_id")
    return name


def media_digests(messages: object) -> tuple[str, ...]:
    """Digests of all parts of the messages that are no text, in order: for the rest, token ids say everything."""
    return tuple(
        _digest(jsontext.dumps_request(part, option=orjson.OPT_SORT_KEYS)).hex() for _, part in beside_text(messages)
    )


def beside_text(messages: object) -> Iterator[tuple[tuple[int, int], object]]:
    """All parts of the messages that are no text, in order, each with the numbers of its message and of itself."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if not (
                isinstance(part, str) or (isinstance(part, dict) and _kind(part) in _TEXT_PARTS | _REASONING_PARTS)
            ):
                yield (i, j), part


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _canonical(message: Mapping[str, Any]) -> bytes:
    """What makes two messages the same although client libraries write them differently.

    Left out: keys without a value, reasoning (many clients drop it, whether it has a field of its own or stands before
    the answer), ids of tool calls, white space around text and in the arguments of calls.
    """
    role, text = message.get("role"), _plain(message.get("content"))
    if role == "assistant" and isinstance(text, str):
        text = _without_thoughts(text)
    listed = message.get("tool_calls")
    parts = [role, message.get("name"), text, _calls(listed) if listed else []]
    return jsontext.dumps_request(parts, option=orjson.OPT_SORT_KEYS)


def _plain(content: object) -> object:
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
            for part in content
            if not (isinstance(part, dict) and _kind(part) in _REASONING_PARTS)
        ]
        content = parts[0] if len(parts) == 1 else parts
    return content.strip() if isinstance(content, str) else content or ""


def _calls(listed: object) -> list[list[object]]:
    return [
        [call.get("function", {}).get("name"), _arguments(call.get("function", {}).get("arguments"))]
        for call in (listed if isinstance(listed, list) else ())
        if isinstance(call, dict) and isinstance(call.get("function", {}), dict)
    ]


def _without_thoughts(text: str) -> str:
    """The answer after the thoughts, whether their beginning is in the text or was in the prompt.

    Histories that differ in nothing else thereby share a key; that costs one of them its record, never its answer.
    """
    thoughts, closed, answer = text.partition(_THINK_CLOSE)
    return answer.strip() if closed and thoughts.rfind(_THINK_OPEN) <= 0 else text


def _arguments(arguments: object) -> object:
    """Of a tool call: JSON, which some clients parse and write again."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (ValueError, TypeError):
        return arguments


def _kind(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    return kind if isinstance(kind, str) else None

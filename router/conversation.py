"""Which conversation a request belongs to, and what is remembered of one between two turns.

A conversation is *named* by the client (body `conversation_id`, header `X-Conversation-Id` or `X-Session-Id`), or
found by its content: a chain of digests over the messages. After a turn the record is filed under the digest of the
history plus the answer just given; the next request's history ends in that answer, so it finds the record.

Either way the key is a digest over tenant, model and cache salt too, so that nobody finds what is another's.
Finding a record proves nothing about the next prompt: before KV is reused the token ids are compared.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Final, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field

from connectors.wire.openai import bad_request
from router import jsontext

KEY_PREFIX: Final = "backhaul:conversation:1:"
MAX_NAME_LENGTH: Final = 512
NAME_HEADERS: Final = ("X-Conversation-Id", "X-Session-Id")

_DIGEST_BYTES: Final = 16
_TOKEN = "I"
_HEAD = struct.Struct("<BII")  # format version, bytes of the facts, bytes of the prompt ids
_VERSION: Final = 1

assert array(_TOKEN).itemsize == 4


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose conversations, of which model: part of every key."""

    tenant: str
    model: str
    cache_salt: str | None

    def digest(self, kind: str) -> bytes:
        return _digest(orjson.dumps([kind, self.tenant, self.model, self.cache_salt]))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Where the record of the last turn is found, and where that of this turn goes."""

    find: str | None
    """Store key; None when there can be no earlier turn, or none that could be told."""
    named: bool
    history: bytes | None
    """Digest of an unnamed conversation's messages so far."""

    def file_under(self, answer: Mapping[str, Any] | None) -> str | None:
        """The store key for this turn's record, given the assistant message it produced."""
        if self.named:
            return self.find
        if self.history is None or answer is None:
            return None
        return KEY_PREFIX + _digest(self.history + _canonical(answer)).hex()


def identify(scope: Scope, name: str | None, messages: object) -> Conversation:
    """The conversation of a request; `messages` is its history if it is a chat, as yet unchecked.

    A name out of a header may hold surrogates, for bytes that are no UTF-8.
    """
    if name is not None:
        digest = _digest(scope.digest("name") + name.encode(errors="surrogatepass"))
        return Conversation(KEY_PREFIX + digest.hex(), True, None)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        return Conversation(None, False, None)
    chain = scope.digest("messages")
    last_answer: bytes | None = None
    for message in messages:
        chain = _digest(chain + _canonical(message))
        if message.get("role") == "assistant":
            last_answer = chain
    return Conversation(None if last_answer is None else KEY_PREFIX + last_answer.hex(), False, chain)


def name_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The name the client gives the conversation; the body's goes before the headers'."""
    name = body.get("conversation_id")
    if name is None:
        name = next((headers[header] for header in NAME_HEADERS if headers.get(header)), None)
    if name is None or name == "":
        return None
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        raise bad_request(f"A string of at most {MAX_NAME_LENGTH} characters expected.", param="conversation_id")
    return name


class _Facts(BaseModel):
    """The part of a stored record that is JSON: anyone may have written it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    turn: Annotated[int, Field(ge=1, lt=2**31)]
    prefill: str | None
    decode: str
    deadline: float
    params: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Record:
    """What one turn leaves for the next."""

    turn: int
    prefill: str | None
    """URL of the engine that prefilled."""
    decode: str
    deadline: float
    """Wall clock time after which the record is of no use."""
    prompt_ids: bytes = b""
    """Packed by `pack_ids`; empty if the engine did not tell."""
    output_ids: bytes = b""
    params: Mapping[str, Any] | None = None
    """The decode engine's transfer params: where this turn's KV lies."""

    def pack(self) -> bytes:
        facts = orjson.dumps(
            {
                "turn": self.turn,
                "prefill": self.prefill,
                "decode": self.decode,
                "deadline": self.deadline,
                "params": self.params,
            }
        )
        return _HEAD.pack(_VERSION, len(facts), len(self.prompt_ids)) + facts + self.prompt_ids + self.output_ids

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises ValueError for anything this version did not write."""
        if len(data) < _HEAD.size or data[0] != _VERSION:
            raise ValueError("not a conversation record of this version")
        _, facts_bytes, prompt_bytes = _HEAD.unpack_from(data)
        ids_start = _HEAD.size + facts_bytes
        prompt_ids, output_ids = data[ids_start : ids_start + prompt_bytes], data[ids_start + prompt_bytes :]
        if len(prompt_ids) != prompt_bytes or prompt_bytes % 4 or len(output_ids) % 4:
            raise ValueError("a conversation record cut short")
        facts = _Facts.model_validate(orjson.loads(data[_HEAD.size : ids_start]))
        return cls(
            turn=facts.turn,
            prefill=facts.prefill,
            decode=facts.decode,
            deadline=facts.deadline,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            params=facts.params,
        )


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token, little-endian."""
    ids = array(_TOKEN, token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    ids = array(_TOKEN, data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _canonical(message: Mapping[str, Any]) -> bytes:
    """What makes two messages the same although client libraries write them differently.

    Left out: keys without a value, reasoning (many clients drop it), ids of tool calls, white space around text.
    """
    listed = message.get("tool_calls")
    calls = [
        [call.get("function", {}).get("name"), call.get("function", {}).get("arguments")]
        for call in (listed if isinstance(listed, list) else ())
        if isinstance(call, dict) and isinstance(call.get("function", {}), dict)
    ]
    text = _plain(message.get("content"))
    parts = [message.get("role"), message.get("name"), text, calls]
    return jsontext.dumps_request(parts, option=orjson.OPT_SORT_KEYS)


def _plain(content: object) -> object:
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in content
        ]
        content = parts[0] if len(parts) == 1 else parts
    return content.strip() if isinstance(content, str) else content or ""

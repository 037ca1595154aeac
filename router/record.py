"""What is kept of a conversation between two turns, as bytes.

Most of it is numbers: token ids, block ids, block hashes. They are packed in binary, and without a loop over them in
Python, since the event loop waits meanwhile. The few facts beside them are JSON.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Final, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field

from connectors.wire.transfer import KVTransferParams
from router import jsontext

FEW_BLOCKS: Final = 16
"""Up to so many are written as JSON: to pack them would take longer and save nothing."""
MAX_TURN: Final = 2**31 - 1
MAX_HASH_BYTES: Final = 1 << 16

_VERSION: Final = 2
_HEAD: Final = struct.Struct("<BBII")  # format version, bytes of a token id, number of token ids, bytes of the facts
_OFFER_HEAD: Final = struct.Struct("<BI")  # format version, bytes of the facts
_ITEM: Final = "I"
_ITEM_BYTES: Final = 4

assert array(_ITEM).itemsize == _ITEM_BYTES


class _Facts(BaseModel):
    """The part of a stored record that is JSON: anyone may have written it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    turn: Annotated[int, Field(ge=1, le=MAX_TURN)]
    prefill: str | None
    decode: str
    deadline: float
    media: tuple[str, ...]


class _OfferFacts(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    params: dict[str, Any]
    """Without what follows in binary."""
    groups: list[Annotated[int, Field(ge=0)]] | None
    """How many block ids each KV-cache group has; None if they are in `params`, or nowhere."""
    id_bytes: Annotated[int, Field(ge=1, le=_ITEM_BYTES)]
    hashes: Annotated[int, Field(ge=0)] | None
    """How many block hashes there are; None if they are in `params`, or nowhere."""
    hash_bytes: Annotated[int, Field(ge=1, le=MAX_HASH_BYTES)]


@dataclass(slots=True)
class Record:
    """What one turn leaves for the next, for any number of readers."""

    turn: int
    """Counts from 1."""
    prefill: str | None
    """URL of the engine that prefilled."""
    decode: str
    """URL of the engine that decoded."""
    deadline: float
    """Wall clock time after which the record is of no use."""
    token_ids: array[int]
    """`array("I")`: the prompt's ids, then those of the answer as far as they are complete. Empty if not known."""
    media: tuple[str, ...] = ()
    """Digests of what in the messages is no text, in order."""

    def pack(self) -> bytes:
        """At most 3 bytes a token for vocabularies of up to 2^24."""
        facts = orjson.dumps(
            {
                "turn": self.turn,
                "prefill": self.prefill,
                "decode": self.decode,
                "deadline": self.deadline,
                "media": self.media,
            }
        )
        width, ids = _pack_numbers(self.token_ids)
        return _HEAD.pack(_VERSION, width, len(self.token_ids), len(facts)) + facts + ids

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises ValueError for anything this version did not write."""
        if len(data) < _HEAD.size or data[0] != _VERSION:
            raise ValueError("not a conversation record of this version")
        _, width, num_ids, facts_bytes = _HEAD.unpack_from(data)
        ids_start = _HEAD.size + facts_bytes
        if not 1 <= width <= _ITEM_BYTES or len(data) != ids_start + width * num_ids:
            raise ValueError("a conversation record cut short")
        facts = _Facts.model_validate_json(data[_HEAD.size : ids_start])
        return cls(
            turn=facts.turn,
            prefill=facts.prefill,
            decode=facts.decode,
            deadline=facts.deadline,
            token_ids=_unpack_numbers(data[ids_start:], width, num_ids),
            media=facts.media,
        )


def pack_offer(params: KVTransferParams) -> bytes:
    """D's transfer params, `prompt_token_ids` left out: an offer names blocks, the ids are the record's.

    Raises ValueError if an engine put into them what cannot be written as JSON.
    """
    packed: list[bytes] = []
    aside = {"prompt_token_ids"}
    facts: dict[str, Any] = {"groups": None, "id_bytes": 1, "hashes": None, "hash_bytes": 1}
    few = sum(map(len, params.remote_block_ids or ())) < FEW_BLOCKS
    if not few and params.remote_block_ids is not None and (ids := _as_numbers(params.remote_block_ids)) is not None:
        facts["groups"] = [len(group) for group in params.remote_block_ids]
        facts["id_bytes"], data = _pack_numbers(ids)
        packed.append(data)
        aside.add("remote_block_ids")
    if not few and params.remote_block_hashes and (hashes := _pack_hashes(params.remote_block_hashes)) is not None:
        facts["hashes"] = len(params.remote_block_hashes)
        facts["hash_bytes"] = len(hashes) // len(params.remote_block_hashes)
        packed.append(hashes)
        aside.add("remote_block_hashes")
    try:
        facts["params"] = {key: value for key, value in params.to_json().items() if key not in aside}
        text = jsontext.dumps(facts)
    except (TypeError, RecursionError) as error:
        raise ValueError("transfer params that are no JSON") from error
    return _OFFER_HEAD.pack(_VERSION, len(text)) + text + b"".join(packed)


def unpack_offer(data: bytes) -> KVTransferParams:
    """Raises ValueError for anything this version did not write."""
    if len(data) < _OFFER_HEAD.size or data[0] != _VERSION:
        raise ValueError("not an offer of this version")
    _, facts_bytes = _OFFER_HEAD.unpack_from(data)
    ids_start = _OFFER_HEAD.size + facts_bytes
    facts = _OfferFacts.model_validate(jsontext.loads(data[_OFFER_HEAD.size : ids_start]))
    num_ids = sum(facts.groups or ())
    hashes_start = ids_start + num_ids * facts.id_bytes
    if len(data) != hashes_start + (facts.hashes or 0) * facts.hash_bytes:
        raise ValueError("an offer cut short")
    params = facts.params
    if facts.groups is not None:
        ids = _unpack_numbers(data[ids_start:hashes_start], facts.id_bytes, num_ids).tolist()
        ends = accumulate(facts.groups)
        params["remote_block_ids"] = [ids[end - size : end] for size, end in zip(facts.groups, ends, strict=True)]
    if facts.hashes is not None:
        text = data[hashes_start:].hex(",", facts.hash_bytes)
        params["remote_block_hashes"] = text.split(",") if text else []
    return KVTransferParams.parse(params, where="offer")


def _pack_numbers(numbers: array[int]) -> tuple[int, bytes]:
    """How many bytes a number needs, and all lowest bytes, then all second ones, and so on.

    Planes of bytes rather than one number after the other: they are cut and joined by strided copies.
    """
    if sys.byteorder == "big":
        numbers = array(_ITEM, numbers)
        numbers.byteswap()
    raw = numbers.tobytes()
    planes = [raw[plane::_ITEM_BYTES] for plane in range(_ITEM_BYTES)]
    while len(planes) > 1 and not planes[-1].strip(b"\0"):  # no number needs it
        planes.pop()
    return len(planes), b"".join(planes)


def _unpack_numbers(data: bytes, width: int, count: int) -> array[int]:
    raw = bytearray(_ITEM_BYTES * count)
    for plane in range(width):
        raw[plane::_ITEM_BYTES] = data[plane * count : (plane + 1) * count]
    numbers = array(_ITEM)
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _as_numbers(groups: Sequence[Sequence[int]]) -> array[int] | None:
    """None if one of them is too large: no engine has that many blocks, but what its ids mean is its own affair."""
    numbers = array(_ITEM)
    try:
        for group in groups:
            numbers.extend(group)
    except OverflowError:
        return None
    return numbers


def _pack_hashes(hashes: Sequence[str]) -> bytes | None:
    """None if they are not what comes back from binary: lower-case hex, all of one length."""
    text = "".join(hashes)
    if not text or len(set(map(len, hashes))) != 1:
        return None
    try:
        data = bytes.fromhex(text)
    except ValueError:
        return None
    if data.hex() != text or len(data) % len(hashes) or len(data) // len(hashes) > MAX_HASH_BYTES:
        return None
    return data

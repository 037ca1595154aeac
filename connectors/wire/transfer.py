"""The transfer parameters: the dictionaries engines and router exchange to say where KV or encoder output lies.

Key names and types are those of vLLM's NIXL connector, so that the router drives either engine. Backhaul's own
engine adds optional keys, those marked *ours* below, which other engines ignore.

Nothing else in the project parses these dictionaries. What is read is read strictly (no `"8"` for 8, no `true`
for 1); a key that is not known here is carried through untouched; a key that was absent stays absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
BlockIds = Annotated[list[list[Count]], Field(max_length=64)]

PREFIX_CACHE_MISS = "prefix_cache_miss"
"""Error code of a decode engine that does not have the KV it was thought to have; see `max_prefill_tokens`."""

M = TypeVar("M", bound=BaseModel)

_REMOTE_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_ENGINE_INTERNAL = ("_remote_blocks_processed", "_p_side_truncated")


class WireError(ValueError):
    """A transfer dictionary that must not be used; `param` names the offending key."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """Blocks another engine holds for us: everything a pull needs, complete and consistent."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    """Logical block ids of the owner, in token order."""
    num_tokens: int
    """How many tokens the blocks hold; never more than their capacity."""
    block_hashes: tuple[str, ...]
    """One content hash per block, the partial last one included; empty when the owner sends none."""
    kv_layout: str | None


class KVTransferParams(BaseModel):
    """`kv_transfer_params`, as read from a request or an engine's answer."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    do_remote_prefill: bool | None = None
    """True in a request: pull my prompt's KV before scheduling me. True in an answer: that is what to ask of D."""
    do_remote_decode: bool | None = None
    """True in a request: someone else decodes, hold my blocks. True in an answer: D's blocks, for the next turn's P."""
    remote_block_ids: BlockIds | None = None
    """One list per KV-cache group; a dense model has one group."""
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Port | None = None
    tp_size: Size | None = None
    dcp_size: Size | None = None
    pp_size: Size | None = None
    remote_num_tokens: Count | None = None
    """Tokens the blocks hold KV for; the last sampled token has none."""
    remote_blocks_expiry_time: float | None = None
    """Deadline in the *owner's* monotonic clock; only the owner can compare it."""
    remote_registration_generation: Count | None = None
    transfer_mode: str | None = None
    remote_prefill_cached_tokens: Count | None = None
    prompt_token_ids: list[Count] | None = None
    """Router to either engine: the ids of the prompt, instead of rendering and tokenizing the messages again."""
    remote_block_size: Size | None = None
    """Tokens per block of the owner; what a router needs to know before it can trim an offer."""
    transfer_id: str | None = None
    remote_block_hashes: list[str] | None = None
    """Ours: one content hash per block, hex, chained; lets the reader prove the KV is its own prompt's."""
    kv_layout: str | None = None
    """Ours: fingerprint of model, dtype and block layout; KV is exchanged only between equals."""
    offer_blocks: bool | None = None
    """Ours, router to D: offer this turn's blocks to the next turn's prefill, or do not. By itself D does so after a
    hand-off."""
    max_prefill_tokens: Count | None = None
    """Ours, router to D for such a turn: refuse it (409, PREFIX_CACHE_MISS) rather than compute more of its prompt."""
    remote_blocks_ttl: Seconds | None = None
    """Ours, D's answer: for how long from now the offer stands, unless the room is needed. Router to D: for how long it
    is to stand at most. A duration, since the clocks of two machines have nothing to do with each other."""
    remote_prefill_pulled_tokens: Count | None = None
    """Ours, P's answer: prompt tokens whose KV it pulled from D; beside those it had cached itself."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.do_remote_prefill and self.do_remote_decode:
            raise ValueError("do_remote_prefill and do_remote_decode cannot both be true")
        if self.prompt_token_ids is not None and not self.prompt_token_ids:
            raise ValueError("prompt_token_ids must not be empty")
        return self

    @classmethod
    def parse(cls, value: object, *, where: str = "kv_transfer_params") -> Self:
        """Read a dictionary from the wire. Raises WireError naming the first key that is wrong."""
        return _parse(cls, value, where)

    def to_json(self) -> dict[str, Any]:
        """The dictionary to send: the keys that were given, the unknown ones included, and no others."""
        # All values are plain JSON: to dump the model would copy every id and hash.
        given = self.__pydantic_fields_set__
        told = {key: value for key, value in self.__dict__.items() if key in given}
        return {**told, **(self.__pydantic_extra__ or {})}

    def with_(self, **changes: Any) -> Self:
        """A validated copy with these keys set."""
        return type(self)(**{**self.to_json(), **changes})

    def without(self, *keys: str) -> Self:
        """What is left if these keys are absent."""
        if self.model_fields_set.isdisjoint(keys):  # those that are not known here count as set too
            return self
        return type(self)(**{k: v for k, v in self.to_json().items() if k not in keys})

    def remote_blocks(self, *, block_size: int | None = None) -> RemoteBlocks | None:
        """What a pull needs, or None if no blocks are named.

        Raises WireError if blocks are named but the owner is not, or if they cannot hold `remote_num_tokens`
        (given the reader's `block_size`): such a dictionary would hang or corrupt the reader.
        """
        if not self._names_blocks(block_size):
            return None
        [blocks] = self.remote_block_ids or []
        return RemoteBlocks(
            engine_id=str(self.remote_engine_id),
            request_id=str(self.remote_request_id),
            host=str(self.remote_host),
            port=int(self.remote_port or 0),
            block_ids=tuple(blocks),
            num_tokens=self.remote_num_tokens or 0,
            block_hashes=tuple(self.remote_block_hashes or ()),
            kv_layout=self.kv_layout,
        )

    def _names_blocks(self, block_size: int | None = None) -> bool:
        """Whether it does; raises WireError as `remote_blocks`."""
        groups = self.remote_block_ids
        if not groups or not any(groups):
            return False
        if len(groups) != 1:
            raise WireError("kv_transfer_params.remote_block_ids", f"one KV-cache group expected, got {len(groups)}")
        for key in _REMOTE_KEYS:
            if getattr(self, key) in (None, ""):
                raise WireError(f"kv_transfer_params.{key}", "required when remote_block_ids is given")
        blocks, tokens = groups[0], self.remote_num_tokens
        if tokens is None:
            raise WireError("kv_transfer_params.remote_num_tokens", "required when remote_block_ids is given")
        if block_size is not None and -(-tokens // block_size) != len(blocks):
            raise WireError(
                "kv_transfer_params.remote_num_tokens",
                f"{tokens} tokens need {-(-tokens // block_size)} blocks of {block_size}, got {len(blocks)}",
            )
        hashes = self.remote_block_hashes or []
        if hashes and len(hashes) != len(blocks):
            raise WireError("kv_transfer_params.remote_block_hashes", f"{len(blocks)} expected, got {len(hashes)}")
        return True

    def trimmed(self, num_tokens: int, *, block_size: int | None = None) -> KVTransferParams | None:
        """The same offer for the first `num_tokens` tokens only: blocks, hashes and token count cut together.

        A cut falls on a block's edge: what stays is named in whole blocks. None if nothing stays, or if this offer
        cannot be cut: its block size is not known (`block_size` helps out where the owner does not say), or it has
        several KV-cache groups, whose lists end at different tokens. None too if its counts do not fit each other.
        """
        groups, offered = self.remote_block_ids, self.remote_num_tokens
        if not groups or offered is None or num_tokens <= 0:
            return None
        size = self.remote_block_size or block_size
        if len(groups) == 1 and size is not None and -(-offered // size) != len(groups[0]):
            return None  # a reader that counts from the end would read other blocks
        if num_tokens >= offered:
            return self
        if len(groups) != 1 or size is None:
            return None
        num_blocks = num_tokens // size
        if num_blocks == 0:
            return None
        changes: dict[str, Any] = {
            "remote_block_ids": [groups[0][:num_blocks]],
            "remote_num_tokens": num_blocks * size,
        }
        if self.remote_block_hashes is not None:
            changes["remote_block_hashes"] = self.remote_block_hashes[:num_blocks]
        return self.model_copy(update=changes)  # a part of what is valid is

    # What router and engines ask of each other, so that no caller ever sets the booleans by hand.

    @classmethod
    def for_prefill(cls, offer: KVTransferParams | None = None) -> KVTransferParams:
        """Router to P: prefill and hold the blocks. `offer` are D's blocks of the last turn, to be pulled."""
        if offer is None:
            return _HOLD
        flags = {"do_remote_decode": True, "do_remote_prefill": False}
        return offer.without(*_ENGINE_INTERNAL, "prompt_token_ids").model_copy(update=flags)

    @classmethod
    def for_decode_alone(cls, *, max_prefill_tokens: int | None = None) -> KVTransferParams:
        """Router to one of our D, for a turn that it prefills itself: offer the blocks to the next turn. With
        `max_prefill_tokens`: but only if no more than these are missing in its prefix cache."""
        flags: dict[str, Any] = {"do_remote_prefill": False, "do_remote_decode": False, "offer_blocks": True}
        if max_prefill_tokens is not None:
            flags["max_prefill_tokens"] = max_prefill_tokens
        return cls(**flags)

    def kept_for(self, seconds: float) -> Self:
        """Router to one of our D, besides: what this turn leaves is of no use to a next one after so long."""
        return self.model_copy(update={"remote_blocks_ttl": seconds})

    def for_decode(self) -> KVTransferParams:
        """Router to D: P's answer as it is.

        Raises WireError if P's answer does not name blocks to pull: a D told to pull without them may hang.
        """
        if not self.do_remote_prefill or not self._names_blocks():
            raise WireError("kv_transfer_params.remote_block_ids", "the prefill answer names no blocks to pull")
        return self.without(*_ENGINE_INTERNAL, "prompt_token_ids")


_HOLD = KVTransferParams(do_remote_decode=True, do_remote_prefill=False)


class ECItem(BaseModel):
    """Where the encoder output of one media item lies."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    modality: str | None = None
    metadata: dict[str, Any] | None = None
    """Small values needed to lay out placeholders, such as image grid sizes."""
    item_indices: list[Count] | None = None
    """Positions of the item in the request; a repeated picture has several."""
    peer_host: str | None = None
    peer_port: Port | None = None
    size_bytes: Count | None = None
    shape: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """[rows, width] of the embedding matrix."""
    transfer_id: str | None = None
    engine_id: str | None = None
    """Ours: the engine at peer_host and peer_port, which another may have taken the place of."""
    lease_id: str | None = None
    """Ours: what its owner knows the announcement by. It is for one reader."""
    block_ids: Annotated[list[Count], Field(max_length=1 << 16)] | None = None
    """Ours: where the rows lie, in order."""
    ec_layout: str | None = None
    """Ours: fingerprint of model, dtype and blocks; encodings are exchanged only between equals."""


class ECRequestItem(BaseModel):
    """One entry of `ec_items`: a transfer the consumer of a request waits for."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    transfer_id: str
    mm_hash: str | None = None


class ECTransferParams(BaseModel):
    """`ec_transfer_params`: media identifier -> where its encoder output lies, and two keys of the request."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, ECItem]

    consumer_zmq: str | None = None
    ec_items: list[ECRequestItem] | None = None

    @property
    def items(self) -> Mapping[str, ECItem]:
        """The media items by identifier."""
        return self.__pydantic_extra__

    @classmethod
    def parse(cls, value: object, *, where: str = "ec_transfer_params") -> Self:
        """Read a dictionary from the wire. Raises WireError naming the first key that is wrong."""
        return _parse(cls, value, where)

    def to_json(self) -> dict[str, Any]:
        """The dictionary to send: the keys that were given, the unknown ones included, and no others."""
        return self.model_dump(exclude_unset=True)

    def merge(self, other: ECTransferParams) -> ECTransferParams:
        """The union of two producers' answers, in a new object; `other` wins where both name an item."""
        return ECTransferParams.parse({**self.to_json(), **other.to_json()})


def _parse(model: type[M], value: object, where: str) -> M:
    if not isinstance(value, dict | Mapping):
        raise WireError(where, f"an object expected, got {type(value).__name__}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join([where, *(str(part) for part in first["loc"])])
        raise WireError(path, first["msg"]) from None

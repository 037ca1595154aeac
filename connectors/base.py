"""The connector: the hooks by which a scheduler lets KV come from, and stay for, other engines.

The four scheduler hooks keep the names a vLLM reader knows. All are called on the engine's main thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Protocol

from connectors.transport import TransferEvent
from connectors.wire.transfer import ECTransferParams, KVTransferParams


class Picture(Protocol):
    """The part of a picture in a request that a connector sees."""

    @property
    def identifier(self) -> str: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def modality(self) -> str: ...


class TransferRequest(Protocol):
    """The part of an engine's request that a connector sees."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def kv_transfer_params(self) -> KVTransferParams | None: ...
    @property
    def ec_transfer_params(self) -> ECTransferParams | None: ...
    @property
    def block_ids(self) -> Sequence[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_external_tokens(self) -> int: ...
    @property
    def media(self) -> Sequence[Picture]:
        """In the order of their places; one that appears twice is there twice."""

    @property
    def handed_off(self) -> bool:
        """True if the request finished in a way that leaves KV worth holding (stopped or length)."""

    def hash_chain(self, num_tokens: int) -> list[bytes]:
        """Content hashes of the blocks holding the first `num_tokens` tokens, a partial last one included."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The KV a request was parked for is in its blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The KV a request was parked for did not come. `recompute` says what the load-failure policy wants."""

    request_id: str
    recompute: bool
    message: str
    kept_block_ids: tuple[int, ...] = ()
    """The last blocks of the request's table, if a transfer may still write to them: they are no longer the
    request's, but not to be freed before a BlocksReleased names them."""


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """Blocks held for another engine, or kept from a load that failed, may be freed."""

    block_ids: tuple[int, ...]
    idle: bool = False
    """They were held revocably, and no BlocksClaimed has named them."""


@dataclass(frozen=True, slots=True)
class BlocksClaimed:
    """Blocks held revocably are about to be read: they stay until they are released."""

    block_ids: tuple[int, ...]


ConnectorOutcome = Loaded | LoadFailed | BlocksReleased | BlocksClaimed


class Hold(Enum):
    """What becomes of a finished request's blocks."""

    NOTHING = "nothing"
    """They are free."""
    PINNED = "pinned"
    """A reader is on its way: they stay until BlocksReleased names them."""
    REVOCABLE = "revocable"
    """A reader may come: they stay until then, or until `revoke` gives them up because the room is needed."""


class Connector(Protocol):
    """Scheduler-side hooks; see `connectors/kv.py` for the real one."""

    def on_new_request(self, request: TransferRequest) -> None:
        """A request entered the waiting queue: start renewing the lease it depends on.

        Raises WireError if its transfer params cannot be used by this engine.
        """

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """How many prompt tokens beyond the local prefix hit (a whole number of blocks) can be loaded, and
        whether the load is asynchronous. Free of side effects; (0, False) once the request's params were used.
        """

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request got its blocks (`block_ids`, all of them, in order). With external tokens: queue the pull of
        its last `ceil` blocks; without: queue the release of blocks it does not need. Marks the params as used.
        """

    def build_connector_meta(self) -> None:
        """End of scheduling: hand the pulls, releases and due heartbeats of this step to the transport."""

    def request_finished(self, request: TransferRequest) -> tuple[Hold, KVTransferParams | None]:
        """The request ended, its blocks still allocated. Returns (what to do with them, params for the answer)."""

    def revoke(self) -> BlocksReleased | None:
        """Room is needed: give up what is held revocably and not claimed, the oldest first. None if there is no more,
        which may be sooner than the scheduler thinks, for claims are made on other threads."""

    def settle(self, event: TransferEvent) -> Sequence[ConnectorOutcome]:
        """Turn a transport's event into what the scheduler must do."""

    def lease_changes(self, now: float) -> Sequence[ConnectorOutcome]:
        """Leases that were claimed since the last call, or ran out by `now` (monotonic seconds)."""

    def next_wakeup(self) -> float | None:
        """Monotonic time at which a lease runs out or a heartbeat is due, or None: how long an idle engine may
        sleep."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EncodingKey:
    """What an encoding is found by: its name, and its size, which who names it wrongly gets wrong."""

    identifier: str
    num_rows: int

    @classmethod
    def of(cls, picture: Picture) -> EncodingKey:
        return cls(picture.identifier, picture.num_rows)

    def block_names(self, rows_per_block: int) -> list[bytes]:
        """What each of its blocks holds: content hashes, made of the name of the whole."""
        count = -(-self.num_rows // rows_per_block)
        return [
            blake2b(f"{part}/{count} {self.num_rows} {self.identifier}".encode(), digest_size=16).digest()
            for part in range(count)
        ]


@dataclass(frozen=True, slots=True)
class EncodingLoaded:
    """An encoding has been read into the blocks that were given for it."""

    key: EncodingKey


@dataclass(frozen=True, slots=True)
class EncodingFailed:
    """An encoding did not come. Its blocks are free, or `kept`: a transfer may still write to them, and they are not to
    be freed before a BlocksReleased names them."""

    key: EncodingKey
    kept: bool = False


ECOutcome = EncodingLoaded | EncodingFailed | BlocksReleased | BlocksClaimed


class ECConnector(Protocol):
    """Scheduler-side hooks by which encoder output comes from, and stays for, other engines. What vLLM has too has its
    name there; see `connectors/ec.py` for the real one."""

    def on_new_request(self, request: TransferRequest) -> None:
        """A request with pictures came in: note what others have announced to it."""

    def has_cache_item(self, request: TransferRequest, picture: Picture) -> bool:
        """Whether another engine has announced this encoding to this request, in a form that can be used, and was not
        asked for it yet."""

    def why_not(self, request: TransferRequest, picture: Picture) -> str | None:
        """For metrics and messages: why `has_cache_item` is false; None if nobody has announced it."""

    def update_state_after_alloc(self, request: TransferRequest, picture: Picture, block_ids: Sequence[int]) -> None:
        """There are blocks for the encoding: queue its pull."""

    def update_state_after_free(self, key: EncodingKey) -> bool:
        """Nobody waits any longer for the encoding that is being pulled. True if a transfer may still write to its
        blocks: a BlocksReleased names them later."""

    def build_connector_meta(self) -> None:
        """End of scheduling: hand the pulls of this step to the transport."""

    def request_finished(self, request: TransferRequest) -> ECTransferParams | None:
        """The request ended, its encoder output still in the cache. Returns the params for the answer. Called after
        the KV connector's hook and before anything of the request is freed."""

    def revoke(self) -> BlocksReleased | None:
        """Room is needed: give up the oldest announcement that nobody reads; None if there is none."""

    def settle(self, event: TransferEvent) -> Sequence[ECOutcome]:
        """Turn a transport's event into what the scheduler must do."""

    def lease_changes(self, now: float) -> Sequence[ECOutcome]:
        """Announcements that a reader has claimed since the last call, or that ran out by `now`."""

    def next_wakeup(self) -> float | None: ...

    def close(self) -> None: ...


class NullECConnector:
    """An engine that neither encodes for others nor asks them."""

    def on_new_request(self, request: TransferRequest) -> None:
        pass

    def has_cache_item(self, request: TransferRequest, picture: Picture) -> bool:
        return False

    def why_not(self, request: TransferRequest, picture: Picture) -> str | None:
        return None

    def update_state_after_alloc(self, request: TransferRequest, picture: Picture, block_ids: Sequence[int]) -> None:
        raise AssertionError("nothing is loaded")

    def update_state_after_free(self, key: EncodingKey) -> bool:
        return False

    def build_connector_meta(self) -> None:
        pass

    def request_finished(self, request: TransferRequest) -> ECTransferParams | None:
        return None

    def revoke(self) -> BlocksReleased | None:
        return None

    def settle(self, event: TransferEvent) -> Sequence[ECOutcome]:
        return ()

    def lease_changes(self, now: float) -> Sequence[ECOutcome]:
        return ()

    def next_wakeup(self) -> float | None:
        return None

    def close(self) -> None:
        pass


class NullConnector:
    """An engine on its own: nothing comes from elsewhere, nothing is held."""

    def on_new_request(self, request: TransferRequest) -> None:
        pass

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self) -> None:
        pass

    def request_finished(self, request: TransferRequest) -> tuple[Hold, KVTransferParams | None]:
        return Hold.NOTHING, None

    def revoke(self) -> BlocksReleased | None:
        return None

    def settle(self, event: TransferEvent) -> Sequence[ConnectorOutcome]:
        return ()

    def lease_changes(self, now: float) -> Sequence[ConnectorOutcome]:
        return ()

    def next_wakeup(self) -> float | None:
        return None

    def close(self) -> None:
        pass

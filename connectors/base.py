"""The connector: the hooks by which a scheduler lets KV come from, and stay for, other engines.

The four scheduler hooks keep the names a vLLM reader knows. All are called on the engine's main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from connectors.transport import TransferEvent
from connectors.wire.transfer import ECTransferParams, KVTransferParams


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


class ECConnector(Protocol):
    """Scheduler-side hooks by which encoder output comes from, and stays for, other engines."""

    def request_finished(self, request: TransferRequest) -> ECTransferParams | None:
        """The request ended, its encoder output still in the cache. Returns the params for the answer. Called after
        the KV connector's hook and before anything of the request is freed."""


class NullECConnector:
    """An engine that encodes nothing for others."""

    def request_finished(self, request: TransferRequest) -> ECTransferParams | None:
        return None


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

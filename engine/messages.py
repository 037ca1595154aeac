"""What passes between the server's threads and the engine's main thread: plain values through two queues."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.transport import TransferEvent
from connectors.wire.transfer import KVTransferParams
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Stop:
    """The frontend ends a request early: its client left (aborted), or a stop string was found (not aborted)."""

    request_id: str
    aborted: bool
    num_output_tokens: int | None = None
    """With a stop string: output tokens that count; later ones were sampled before the engine heard of it."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the loop; requests still running end as aborted."""


Inbox = Submit | Stop | Shutdown | TransferEvent


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request, and how it ended if it did. The last output of a request is `finished`."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_token_id: int | None = None
    """The entry of stop_token_ids that ended it; None for EOS."""
    kv_transfer_params: KVTransferParams | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    error: str | None = None
    error_status: int = 500
    """HTTP status that `error` stands for: 400 if the request itself is at fault."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

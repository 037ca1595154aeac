"""What passes between the server's threads and the engine's main thread: plain values through two queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from connectors.transport import TransferEvent
from connectors.wire.transfer import ECTransferParams, KVTransferParams
from engine.logprobs import TokenLogprobs
from engine.request import Request

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class EncoderTransfer:
    """Something happened at the transport of the encoder cache."""

    event: TransferEvent


Inbox = Submit | Stop | Shutdown | TransferEvent | EncoderTransfer


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
    ec_transfer_params: ECTransferParams | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each of token_ids, if the request asked for them."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """Of the whole prompt, None for its first token; with the first output of a request that asked for them."""
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    error: str | None = None
    error_status: int = 500
    """HTTP status that `error` stands for: 400 if the request itself is at fault."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def after(self, earlier: Output) -> Output:
        """Both as one, for a reader slower than the engine. What only the earlier one said stays said."""
        return replace(
            self,
            token_ids=[*earlier.token_ids, *self.token_ids],
            logprobs=[*earlier.logprobs, *self.logprobs],
            kv_transfer_params=_either(self.kv_transfer_params, earlier.kv_transfer_params),
            ec_transfer_params=_either(self.ec_transfer_params, earlier.ec_transfer_params),
            prompt_logprobs=_either(self.prompt_logprobs, earlier.prompt_logprobs),
        )


def _either(later: T | None, earlier: T | None) -> T | None:
    return earlier if later is None else later

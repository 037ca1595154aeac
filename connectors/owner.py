"""The owner's side of the KV connector: which finished requests leave their blocks to others, and what is said of them.

A prefill engine *hands over*: the decode engine is on its way, and the blocks stay until it has read them or its
heartbeats stop. A decode engine *offers*: the conversation's next turn may come, and the blocks stay as long as nobody
else needs the room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from connectors.base import BlocksClaimed, BlocksReleased, ConnectorOutcome, Hold, TransferRequest
from connectors.lease import Ended, Leases
from connectors.transport import Peer
from connectors.wire.transfer import KVTransferParams


class Owner:
    """Puts finished requests' blocks under lease. Engine thread only; the counters may be read from any."""

    def __init__(
        self,
        leases: Leases,
        *,
        me: Peer,
        block_size: int,
        kv_layout: str,
        lease_seconds: float,
        offer_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._me = me
        self._block_size = block_size
        self._kv_layout = kv_layout
        self._lease_seconds = lease_seconds
        self._offer_seconds = offer_seconds
        self._clock = clock
        self.num_released_after_expiry = 0
        """A reader was done with blocks whose lease had run out: leases are too short, or a claim was outlived."""
        self.num_released_unknown = 0

    def hand_over(self, request: TransferRequest) -> tuple[Hold, KVTransferParams]:
        """Of a prefill leg: hold its blocks for the decode engine."""
        hashes = self._hold(request, self._lease_seconds, revocable=False)
        return Hold.PINNED if hashes else Hold.NOTHING, self._describe(
            request,
            hashes,
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_blocks_expiry_time=None,
            remote_prefill_cached_tokens=request.num_cached_tokens,
            remote_prefill_pulled_tokens=request.num_external_tokens,
        )

    def offer(self, request: TransferRequest) -> tuple[Hold, KVTransferParams | None]:
        """Of a decode leg: keep its blocks for the next turn's prefill engine, if there are any, and for no longer than
        was asked."""
        asked = request.kv_transfer_params
        wanted = None if asked is None else asked.remote_blocks_ttl
        seconds = self._offer_seconds if wanted is None else min(self._offer_seconds, wanted)
        expires_at = self._clock() + seconds
        hashes = self._hold(request, seconds, revocable=True)
        if not hashes:
            return Hold.NOTHING, None
        return Hold.REVOCABLE, self._describe(
            request,
            hashes,
            do_remote_prefill=False,
            do_remote_decode=True,
            remote_blocks_expiry_time=expires_at,
            remote_blocks_ttl=seconds,
            remote_block_size=self._block_size,
        )

    def revoke(self) -> BlocksReleased | None:
        ended = self._leases.revoke_oldest()
        return None if ended is None else _released(ended)

    def lease_changes(self, now: float) -> Sequence[ConnectorOutcome]:
        expired = [_released(ended) for ended in self._leases.expire(now)]
        return [*expired, *(BlocksClaimed(block_ids) for block_ids in self._leases.take_claimed())]

    def lease_released(self, request_id: str) -> Sequence[ConnectorOutcome]:
        ended = self._leases.release(request_id)
        if ended is not None:
            return (_released(ended),)
        match self._leases.fate(request_id):
            case "expired":
                self.num_released_after_expiry += 1
            case "released" | None:
                self.num_released_unknown += 1
            case "revoked":
                pass  # nobody can have read it; who gave it back did so when it was gone already
        return ()

    def _hold(self, request: TransferRequest, seconds: float, *, revocable: bool) -> list[str]:
        """The hashes of the blocks held, none if there is nothing to hold. The blocks of tokens that do not count (past
        a stop string) are held too, but not told."""
        hashes = hex_chain(request, request.num_computed_tokens)
        if hashes:
            self._leases.hold(request.request_id, request.block_ids, hashes, seconds, revocable=revocable)
        return hashes

    def _describe(self, request: TransferRequest, hashes: list[str], **said: Any) -> KVTransferParams:
        return KVTransferParams(
            remote_block_ids=[list(request.block_ids[: len(hashes)])],
            remote_engine_id=self._me.engine_id,
            remote_request_id=request.request_id,
            remote_host=self._me.host,
            remote_port=self._me.port,
            tp_size=1,
            dcp_size=1,
            pp_size=1,
            remote_num_tokens=request.num_computed_tokens,
            remote_registration_generation=0,
            transfer_mode="pull",
            remote_block_hashes=hashes,
            kv_layout=self._kv_layout,
            **said,
        )


def hex_chain(request: TransferRequest, num_tokens: int) -> list[str]:
    """Content hashes of the blocks holding a request's first `num_tokens` tokens, as they are told to others."""
    return [block_hash.hex() for block_hash in request.hash_chain(num_tokens)]


def _released(ended: Ended) -> BlocksReleased:
    return BlocksReleased(ended.block_ids, ended.idle)

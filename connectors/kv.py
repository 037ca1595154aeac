"""The KV connector: KV goes from prefill to decode within a turn, and from decode to prefill between two turns.

    turn n     prefill engine ── hands over the prompt's KV ──► decode engine ── offers the conversation's KV ──┐
    turn n+1   prefill engine ◄── pulls what its prompt has in common with that ───────────────────────────────┘

Each direction has a reader (`connectors/reader.py`) and an owner (`connectors/owner.py`); an engine is one or the
other by what a request's params say, within what its role allows. Which requests were served so far is state of these
objects, never of the params.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, assert_never

from connectors.base import BlocksReleased, ConnectorOutcome, Hold, TransferRequest
from connectors.lease import Leases
from connectors.owner import Owner
from connectors.reader import Reader
from connectors.transport import (
    LeaseReleased,
    LeasesRenewed,
    Peer,
    PullDone,
    PullFailed,
    PullStalled,
    TransferEvent,
    Transport,
)
from connectors.wire.transfer import KVTransferParams, RemoteBlocks, WireError


class KVConnector:
    """Scheduler-side connector over any transport. Main thread only, but for `check` and `reject`."""

    def __init__(
        self,
        *,
        transport: Transport,
        leases: Leases,
        role: Literal["prefill", "decode", "both"],
        engine_id: str,
        host: str,
        port: int,
        block_size: int,
        kv_layout: str,
        lease_seconds: float,
        load_failure_policy: Literal["recompute", "fail"],
        bidirectional: bool = True,
        recompute_threshold: int = 64,
        offer_seconds: float = 480.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bidirectional` is whether decode offers its blocks and prefill takes such offers; `recompute_threshold` the
        tokens from which it does; `offer_seconds` how long an offer stands."""
        self.transport = transport
        self.leases = leases
        self._role = role
        self._block_size = block_size
        self._kv_layout = kv_layout
        self._bidirectional = bidirectional
        self.reader = Reader(
            transport,
            engine_id=engine_id,
            block_size=block_size,
            kv_layout=kv_layout,
            lease_seconds=lease_seconds,
            recompute_threshold=recompute_threshold,
            take_offers=bidirectional,
            recompute=load_failure_policy == "recompute",
            clock=clock,
        )
        self.owner = Owner(
            leases,
            me=Peer(engine_id, host, port),
            block_size=block_size,
            kv_layout=kv_layout,
            lease_seconds=lease_seconds,
            offer_seconds=offer_seconds,
            clock=clock,
        )

    # Asked by the server, from its own thread, before it submits a request.

    def check(self, params: KVTransferParams) -> RemoteBlocks | None:
        """The blocks to load for a request with these params, if any: with `do_remote_prefill` those of its prefill
        engine, with `do_remote_decode` those on offer from the last turn's decode engine.

        Raises WireError if the params make no sense to this engine; the client's answer is then a 400. Blocks that
        make sense but are of no use (of another layout, of another prompt, gone) are no error: they are not pulled.
        """
        if params.do_remote_decode and self._role == "decode":
            raise WireError("kv_transfer_params.do_remote_decode", "this is a decode engine; ask a prefill engine")
        if params.do_remote_prefill:
            if self._role == "prefill":
                raise WireError("kv_transfer_params.do_remote_prefill", "this is a prefill engine; ask a decode engine")
            if params.remote_block_ids is None:
                raise WireError("kv_transfer_params.remote_block_ids", "required when do_remote_prefill is true")
        elif not params.do_remote_decode:
            return None
        # Another engine's blocks may have another size; they are not loaded, so their count need not fit ours.
        return params.remote_blocks(block_size=self._block_size if params.kv_layout == self._kv_layout else None)

    def reject(self, params: KVTransferParams) -> None:
        """A request with these params was refused before it was submitted: nobody will read what is held for it."""
        if not (params.do_remote_prefill or params.do_remote_decode):
            return
        try:
            remote = params.remote_blocks()
        except WireError:
            return
        if remote is not None:
            self.transport.release(Peer(remote.engine_id, remote.host, remote.port), remote.request_id)

    # The scheduler's hooks, in the order of a request's life.

    def on_new_request(self, request: TransferRequest) -> None:
        params = request.kv_transfer_params
        if params is None:
            return
        try:
            remote = self.check(params)
        except WireError:
            self.reject(params)
            raise
        if remote is not None:
            self.reader.add(request, remote, "prefill" if params.do_remote_prefill else "decode")

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens = self.reader.num_new_tokens(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.reader.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self) -> None:
        self.reader.send()

    def request_finished(self, request: TransferRequest) -> tuple[Hold, KVTransferParams | None]:
        self.reader.finished(request)
        params = request.kv_transfer_params
        if params is None or not request.handed_off:
            return Hold.NOTHING, None
        if params.do_remote_decode:
            return self.owner.hand_over(request)
        may_be_wanted = params.do_remote_prefill if params.offer_blocks is None else params.offer_blocks
        if may_be_wanted and self._bidirectional and self._role != "prefill":
            return self.owner.offer(request)
        return Hold.NOTHING, None

    def revoke(self) -> BlocksReleased | None:
        return self.owner.revoke()

    def settle(self, event: TransferEvent) -> Sequence[ConnectorOutcome]:
        if isinstance(event, PullDone | PullStalled | PullFailed):
            return self.reader.settle(event)
        if isinstance(event, LeaseReleased):
            return self.owner.lease_released(event.request_id)
        if isinstance(event, LeasesRenewed):
            self.leases.renew(event.request_ids)
            return ()
        assert_never(event)

    def lease_changes(self, now: float) -> Sequence[ConnectorOutcome]:
        return self.owner.lease_changes(now)

    def next_wakeup(self) -> float | None:
        due = [at for at in (self.reader.next_heartbeat(), self.leases.next_expiry()) if at is not None]
        return min(due, default=None)

    def close(self) -> None:
        self.reader.send_releases()
        self.transport.close()

"""The KV connector: a decode engine pulls a prompt's KV from the prefill engine that computed it.

On the decode side a request with `do_remote_prefill` depends on a lease at its prefill engine. What becomes of that
lease, whatever happens to the request, is decided here:

    refused, or its KV cannot be used     released at once
    waits in the queue                    renewed every lease/6
    admitted, local cache has it all      released
    admitted, something is missing        pulled; the read itself releases the lease
    ended before it was admitted          released

On the prefill side a request with `do_remote_decode` that finished well leaves its blocks under a lease, and its
answer says where they lie. Which requests were served so far is state of this object, never of the params.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from connectors.base import BlocksReleased, ConnectorOutcome, Loaded, LoadFailed, TransferRequest
from connectors.lease import Leases
from connectors.transport import (
    LeaseReleased,
    LeasesRenewed,
    Peer,
    Pull,
    PullDone,
    PullFailed,
    PullStalled,
    TransferEvent,
    Transport,
)
from connectors.wire.transfer import KVTransferParams, RemoteBlocks, WireError

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 6
NUM_EXPIRED_REMEMBERED = 1024
RELEASE_AFTER_FAILURE = frozenset({"layout", "transfer"})
"""Failed pulls whose owner is alive and may still hold the blocks; after the others the lease ends by itself."""


@dataclass(slots=True)
class _Fetch:
    """A request of this decode engine and the remote blocks it may load."""

    remote: RemoteBlocks
    peer: Peer
    num_tokens: int
    """Prompt tokens from the start whose KV the remote blocks are said to hold; the pull makes sure."""
    heartbeat_due: float
    num_pulling: int = 0
    """Tokens of the one pull of this request, once it is under way; it ends in an event even if the request is gone."""
    local_block_ids: tuple[int, ...] = ()
    """The blocks it writes to."""


class KVConnector:
    """Scheduler-side connector over any transport. Main thread only, but for `check` and `reject`.

    The public counters are read by the metrics; each is written on the main thread only.
    """

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport = transport
        self.leases = leases
        self._role = role
        self._self = Peer(engine_id, host, port)
        self._block_size = block_size
        self._kv_layout = kv_layout
        self._lease_seconds = lease_seconds
        self._heartbeat_seconds = lease_seconds / HEARTBEATS_PER_LEASE
        self._recompute = load_failure_policy == "recompute"
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}
        self._stalled: dict[str, tuple[int, ...]] = {}
        """Blocks of requests that no longer wait for their pull, though it may still write to them."""
        self._pulls: list[Pull] = []
        self._releases: list[tuple[Peer, str]] = []
        self._expired: OrderedDict[str, None] = OrderedDict()
        """Leases that lately ran out, to tell a late reader from an unknown one."""

        self.num_pulls_done = 0
        self.num_pulls_failed: Counter[str] = Counter()
        """By the transport's reason."""
        self.num_bytes_pulled = 0
        self.seconds_pulling = 0.0
        self.num_tokens_pulled = 0
        self.num_not_pulled: Counter[str] = Counter()
        """Remote blocks released unread, by reason: layout, hashes, length, self, cached, abandoned."""
        self.num_leases_held = 0
        self.num_leases_released = 0
        self.num_leases_expired = 0
        self.num_released_after_expiry = 0
        """A reader was done with blocks whose lease had run out: leases are too short, or a claim was outlived."""
        self.num_released_unknown = 0

    # Asked by the server, from its own thread, before it submits a request.

    def check(self, params: KVTransferParams) -> RemoteBlocks | None:
        """The blocks to load for a request with these params, if any.

        Raises WireError if the params make no sense to this engine; the client's answer is then a 400.
        """
        if params.do_remote_decode and self._role == "decode":
            raise WireError("kv_transfer_params.do_remote_decode", "this is a decode engine; ask a prefill engine")
        if not params.do_remote_prefill:
            return None
        if self._role == "prefill":
            raise WireError("kv_transfer_params.do_remote_prefill", "this is a prefill engine; ask a decode engine")
        if params.remote_block_ids is None:
            raise WireError("kv_transfer_params.remote_block_ids", "required when do_remote_prefill is true")
        # Another engine's blocks may have another size; they are not loaded, so their count need not fit ours.
        return params.remote_blocks(block_size=self._block_size if params.kv_layout == self._kv_layout else None)

    def reject(self, params: KVTransferParams) -> None:
        """A request with these params was refused before it was submitted: nobody will read what is held for it."""
        if not params.do_remote_prefill:
            return
        try:
            remote = params.remote_blocks()
        except WireError:
            return
        if remote is not None:
            self.transport.release(_peer(remote), remote.request_id)

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
        if remote is None:
            return
        num_tokens, obstacle = self._num_loadable(request, remote)
        if num_tokens:
            self._fetches[request.request_id] = _Fetch(remote, _peer(remote), num_tokens, self._clock())
        else:
            self._release(remote, obstacle)

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int, bool]:
        fetch = self._fetches.get(request.request_id)
        # The last prompt token is computed here in any case, for its logits: alone it is not worth a pull.
        if fetch is None or fetch.num_pulling or num_computed_tokens >= request.num_prompt_tokens - 1:
            return 0, False
        missing = fetch.num_tokens - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            assert num_external_tokens == 0, f"{request.request_id}: nothing to load"
            return
        assert not fetch.num_pulling, f"{request.request_id}: loaded twice"
        if num_external_tokens == 0:
            del self._fetches[request.request_id]
            self._release(fetch.remote, "cached")
            return
        end = len(block_ids)
        start = end - _ceil_div(num_external_tokens, self._block_size)
        fetch.num_pulling, fetch.local_block_ids = num_external_tokens, tuple(block_ids[start:])
        fetch.heartbeat_due = self._clock() + self._heartbeat_seconds
        self._pulls.append(
            Pull(
                request_id=request.request_id,
                peer=fetch.peer,
                remote_request_id=fetch.remote.request_id,
                local_block_ids=fetch.local_block_ids,
                remote_block_ids=fetch.remote.block_ids[start:end],
                first_block=start,
                block_hashes=tuple(_hex_chain(request, fetch.num_tokens)[start:end]),
                kv_layout=self._kv_layout,
            )
        )

    def build_connector_meta(self) -> None:
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            self.transport.pull(pull)
        self._send_releases()
        self._send_heartbeats()

    def request_finished(self, request: TransferRequest) -> tuple[bool, KVTransferParams | None]:
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and not fetch.num_pulling:
            del self._fetches[request.request_id]
            self._release(fetch.remote, "abandoned")
        params = request.kv_transfer_params
        if params is None or not params.do_remote_decode or not request.handed_off:
            return False, None
        return self._hold(request)

    def settle(self, event: TransferEvent) -> Sequence[ConnectorOutcome]:
        if isinstance(event, PullDone):
            return self._pull_done(event)
        if isinstance(event, PullStalled):
            return self._pull_stalled(event)
        if isinstance(event, PullFailed):
            return self._pull_failed(event)
        if isinstance(event, LeaseReleased):
            return self._lease_released(event.request_id)
        if isinstance(event, LeasesRenewed):
            self.leases.renew(event.request_ids)
            return ()
        assert_never(event)

    def expire(self, now: float) -> Sequence[ConnectorOutcome]:
        outcomes = []
        for request_id, block_ids in self.leases.expire(now):
            self.num_leases_expired += 1
            self._expired[request_id] = None
            outcomes.append(BlocksReleased(block_ids))
        while len(self._expired) > NUM_EXPIRED_REMEMBERED:
            self._expired.popitem(last=False)
        return outcomes

    def next_wakeup(self) -> float | None:
        due = [fetch.heartbeat_due for fetch in self._fetches.values()]
        expiry = self.leases.next_expiry()
        return min(due if expiry is None else [*due, expiry], default=None)

    def close(self) -> None:
        self._send_releases()
        self.transport.close()

    # Decode side.

    def _num_loadable(self, request: TransferRequest, remote: RemoteBlocks) -> tuple[int, str]:
        """(prompt tokens whose KV the remote blocks are said to hold, what stands in the way if there are none).

        A pull compares the same hashes with what the owner says; this spares it where the params already differ.
        """
        if remote.kv_layout != self._kv_layout:
            return 0, "layout"
        if remote.engine_id == self._self.engine_id:
            # What this engine held for itself is in its own prefix cache.
            return 0, "self"
        num_prompt = request.num_prompt_tokens
        chain = _hex_chain(request, num_prompt)
        equal = 0
        while equal < min(len(chain), len(remote.block_hashes)) and chain[equal] == remote.block_hashes[equal]:
            equal += 1
        # Only the whole prompt ends in a partial block; a shorter common prefix is made of full ones.
        num_tokens = min(equal * self._block_size, num_prompt)
        return (num_tokens, "hashes") if num_tokens <= remote.num_tokens else (0, "length")

    def _release(self, remote: RemoteBlocks, reason: str) -> None:
        self.num_not_pulled[reason] += 1
        self._releases.append((_peer(remote), remote.request_id))

    def _send_releases(self) -> None:
        releases, self._releases = self._releases, []
        for peer, remote_request_id in releases:
            self.transport.release(peer, remote_request_id)

    def _send_heartbeats(self) -> None:
        now = self._clock()
        due = {fetch.peer for fetch in self._fetches.values() if now >= fetch.heartbeat_due}
        if not due:
            return
        by_peer: dict[Peer, list[str]] = {}
        for fetch in self._fetches.values():
            # One message a peer: whoever shares it is renewed early and comes into step.
            if fetch.peer in due:
                by_peer.setdefault(fetch.peer, []).append(fetch.remote.request_id)
                fetch.heartbeat_due = now + self._heartbeat_seconds
        for peer, remote_request_ids in by_peer.items():
            self.transport.renew(peer, remote_request_ids)

    def _pull_done(self, event: PullDone) -> Sequence[ConnectorOutcome]:
        fetch = self._fetches.pop(event.request_id, None)
        if fetch is None:
            return ()
        self.num_pulls_done += 1
        self.num_tokens_pulled += fetch.num_pulling
        self.num_bytes_pulled += event.num_bytes
        self.seconds_pulling += event.seconds
        return (Loaded(event.request_id),)

    def _pull_stalled(self, event: PullStalled) -> Sequence[ConnectorOutcome]:
        """The request goes on without its load; the blocks stay out of use until the read is known to be over."""
        fetch = self._fetches.pop(event.request_id, None)
        if fetch is None:
            return ()
        self._stalled[event.request_id] = fetch.local_block_ids
        return (self._load_failed(fetch, event.request_id, "timeout", event.detail, fetch.local_block_ids),)

    def _pull_failed(self, event: PullFailed) -> Sequence[ConnectorOutcome]:
        stalled = self._stalled.pop(event.request_id, None)
        fetch = self._fetches.pop(event.request_id, None)
        if stalled is not None:
            return (BlocksReleased(stalled),)
        if fetch is None:
            return ()
        if event.reason in RELEASE_AFTER_FAILURE:
            self._releases.append((fetch.peer, fetch.remote.request_id))
        return (self._load_failed(fetch, event.request_id, event.reason, event.detail),)

    def _load_failed(
        self, fetch: _Fetch, request_id: str, reason: str, detail: str, kept_block_ids: tuple[int, ...] = ()
    ) -> LoadFailed:
        self.num_pulls_failed[reason] += 1
        peer = fetch.peer
        logger.warning(
            "pull failed request_id=%s peer=%s:%d reason=%s recompute=%s detail=%s",
            request_id, peer.host, peer.port, reason, self._recompute, detail,
        )  # fmt: skip
        message = f"the KV computed by {peer.host}:{peer.port} could not be loaded ({reason})"
        return LoadFailed(request_id, self._recompute, message, kept_block_ids)

    # Prefill side.

    def _hold(self, request: TransferRequest) -> tuple[bool, KVTransferParams]:
        num_tokens = request.num_computed_tokens
        block_ids = list(request.block_ids[: _ceil_div(num_tokens, self._block_size)])
        block_hashes = _hex_chain(request, num_tokens)
        if block_ids:
            self.leases.hold(request.request_id, request.block_ids, block_hashes, self._lease_seconds)
            self.num_leases_held += 1
        return bool(block_ids), KVTransferParams(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_block_ids=[block_ids],
            remote_engine_id=self._self.engine_id,
            remote_request_id=request.request_id,
            remote_host=self._self.host,
            remote_port=self._self.port,
            tp_size=1,
            dcp_size=1,
            pp_size=1,
            remote_num_tokens=num_tokens,
            remote_blocks_expiry_time=None,
            remote_registration_generation=0,
            transfer_mode="pull",
            remote_prefill_cached_tokens=request.num_cached_tokens,
            remote_block_hashes=block_hashes,
            kv_layout=self._kv_layout,
        )

    def _lease_released(self, request_id: str) -> Sequence[ConnectorOutcome]:
        block_ids = self.leases.release(request_id)
        if block_ids is not None:
            self.num_leases_released += 1
            return (BlocksReleased(block_ids),)
        if request_id in self._expired:
            self.num_released_after_expiry += 1
        else:
            self.num_released_unknown += 1
        return ()


def _peer(remote: RemoteBlocks) -> Peer:
    return Peer(remote.engine_id, remote.host, remote.port)


def _hex_chain(request: TransferRequest, num_tokens: int) -> list[str]:
    return [block_hash.hex() for block_hash in request.hash_chain(num_tokens)]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)

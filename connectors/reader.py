"""The reader's side of the KV connector: what of a prompt's KV is fetched from another engine, and when.

Two engines read: a decode engine what the turn's prefill engine computed, and a prefill engine what the decode engine
of the conversation's last turn has left. For both the plan is the longest prefix whose block hashes are those of the
own prompt, beyond what the own cache has. The hashes in the params serve the plan only; the pull compares those that
the owner tells with its claim, and where the params have none, it alone decides.

A request depends on a lease at another engine until it was served once. What becomes of that lease, whatever happens
to the request, is decided here:

    refused, or its KV cannot be used     released at once
    waits in the queue                    renewed every lease/6, if it is a prefill engine's
    admitted, too little is missing       released
    admitted, enough is missing           pulled; the read itself releases the lease
    ended before it was admitted          released
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from connectors.base import BlocksReleased, ConnectorOutcome, Loaded, LoadFailed, TransferRequest
from connectors.owner import hex_chain
from connectors.transport import Peer, Pull, PullDone, PullFailed, PullStalled, Transport
from connectors.wire.transfer import RemoteBlocks

logger = logging.getLogger(__name__)

Source = Literal["prefill", "decode"]
"""Whose KV: that of this turn's prefill engine, or of the last turn's decode engine."""
HEARTBEATS_PER_LEASE = 6
RELEASE_AFTER_FAILURE = frozenset({"layout", "transfer"})
"""Failed pulls whose owner is alive and may still hold the blocks; after the others the lease ends by itself."""


@dataclass(slots=True)
class _Fetch:
    """A request of this engine and the remote blocks it may load."""

    remote: RemoteBlocks
    peer: Peer
    source: Source
    num_tokens: int
    """Prompt tokens from the start whose KV the remote blocks are said to hold; the pull makes sure."""
    heartbeat_due: float
    """Infinite where the lease is not renewed."""
    num_pulling: int = 0
    """Tokens of the one pull of this request, once it is under way; it ends in an event even if the request is gone."""
    local_block_ids: tuple[int, ...] = ()
    """The blocks it writes to."""


class Reader:
    """Plans the pulls of one engine and follows them. Engine thread only; the counters may be read from any."""

    def __init__(
        self,
        transport: Transport,
        *,
        engine_id: str,
        block_size: int,
        kv_layout: str,
        lease_seconds: float,
        recompute_threshold: int,
        take_offers: bool,
        recompute: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._engine_id = engine_id
        self._block_size = block_size
        self._kv_layout = kv_layout
        self._heartbeat_seconds = lease_seconds / HEARTBEATS_PER_LEASE
        self._recompute_threshold = recompute_threshold
        self._take_offers = take_offers
        self._recompute = recompute
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}
        self._pulls: list[Pull] = []
        self._releases: list[tuple[Peer, str]] = []
        self.stalled: dict[str, tuple[int, ...]] = {}
        """Blocks of requests that no longer wait for their pull, though it may still write to them."""

        self.num_pulls_done = 0
        self.num_pulls_failed: Counter[str] = Counter()
        """By the transport's reason."""
        self.num_bytes_pulled = 0
        self.seconds_pulling = 0.0
        self.num_not_pulled: Counter[str] = Counter()
        """Remote blocks released unread, by reason: layout, self, disabled, hashes, length, cached, below_threshold,
        abandoned."""
        self.num_tokens_pulled: Counter[Source] = Counter()
        self.num_tokens_not_pulled: Counter[tuple[Source, str]] = Counter()
        """Of the prompt tokens that were on offer, those that did not come from there, by reason: as above, and
        failed."""

    @property
    def num_stalled_blocks(self) -> int:
        return sum(map(len, tuple(self.stalled.values())))

    # In the order of a request's life.

    def add(self, request: TransferRequest, remote: RemoteBlocks, source: Source) -> None:
        """A request came in whose KV may be had from elsewhere."""
        covered = min(remote.num_tokens, request.num_prompt_tokens)
        num_tokens, obstacle = self._plan(request, remote, source, covered)
        self._skip(source, obstacle, covered - num_tokens)
        if num_tokens:
            heartbeat_due = self._clock() if source == "prefill" else math.inf
            self._fetches[request.request_id] = _Fetch(remote, _peer(remote), source, num_tokens, heartbeat_due)
        else:
            self.release(remote, obstacle)

    def num_new_tokens(self, request: TransferRequest, num_computed_tokens: int) -> int:
        """How many tokens beyond the computed ones are to be pulled."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.num_pulling:
            return 0
        missing = self._missing(request, fetch, num_computed_tokens)
        return missing if missing >= self._worth(fetch) else 0

    def allocated(self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request was admitted: queue its pull, or the release of what it does not need."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            assert num_external_tokens == 0, f"{request.request_id}: nothing to load"
            return
        assert not fetch.num_pulling, f"{request.request_id}: loaded twice"
        missing = self._missing(request, fetch, request.num_computed_tokens - num_external_tokens)
        self._skip(fetch.source, "cached", fetch.num_tokens - missing)
        if num_external_tokens == 0:
            del self._fetches[request.request_id]
            self._skip(fetch.source, "below_threshold", missing)
            self.release(fetch.remote, "below_threshold" if missing else "cached")
            return
        end = len(block_ids)
        start = end - -(-num_external_tokens // self._block_size)
        fetch.num_pulling, fetch.local_block_ids = num_external_tokens, tuple(block_ids[start:])
        if fetch.source == "prefill":
            fetch.heartbeat_due = self._clock() + self._heartbeat_seconds
        self._pulls.append(
            Pull(
                request_id=request.request_id,
                peer=fetch.peer,
                remote_request_id=fetch.remote.request_id,
                local_block_ids=fetch.local_block_ids,
                remote_block_ids=fetch.remote.block_ids[start:end],
                first_block=start,
                block_hashes=tuple(hex_chain(request, fetch.num_tokens)[start:end]),
                kv_layout=self._kv_layout,
            )
        )

    def finished(self, request: TransferRequest) -> None:
        """The request ended; a pull under way is followed to its end."""
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and not fetch.num_pulling:
            del self._fetches[request.request_id]
            self._skip(fetch.source, "abandoned", fetch.num_tokens)
            self.release(fetch.remote, "abandoned")

    def release(self, remote: RemoteBlocks, reason: str) -> None:
        """Give remote blocks back unread."""
        self.num_not_pulled[reason] += 1
        self._releases.append((_peer(remote), remote.request_id))

    def settle(self, event: PullDone | PullStalled | PullFailed) -> Sequence[ConnectorOutcome]:
        if isinstance(event, PullDone):
            return self._pull_done(event)
        return self._pull_stalled(event) if isinstance(event, PullStalled) else self._pull_failed(event)

    def send(self) -> None:
        """Hand the pulls, releases and due heartbeats to the transport."""
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            self._transport.pull(pull)
        self.send_releases()
        self._send_heartbeats()

    def send_releases(self) -> None:
        releases, self._releases = self._releases, []
        for peer, remote_request_id in releases:
            self._transport.release(peer, remote_request_id)

    def next_heartbeat(self) -> float | None:
        """Monotonic seconds; None if none is to be sent."""
        due = min((fetch.heartbeat_due for fetch in self._fetches.values()), default=math.inf)
        return None if math.isinf(due) else due

    # What to pull.

    def _plan(self, request: TransferRequest, remote: RemoteBlocks, source: Source, covered: int) -> tuple[int, str]:
        """(prompt tokens whose KV the remote blocks are said to hold, what stands in the way of more)."""
        if source == "decode" and not self._take_offers:
            return 0, "disabled"
        if remote.kv_layout != self._kv_layout:
            return 0, "layout"
        if remote.engine_id == self._engine_id:
            # What this engine held for itself is in its own prefix cache.
            return 0, "self"
        if not remote.block_hashes:
            # A partial block is good for exactly the tokens it was computed for.
            whole = covered if covered == remote.num_tokens else covered - covered % self._block_size
            return whole, "length"
        chain = hex_chain(request, covered)
        equal = 0
        while equal < len(chain) and chain[equal] == remote.block_hashes[equal]:
            equal += 1
        return min(equal * self._block_size, covered), "hashes"

    def _missing(self, request: TransferRequest, fetch: _Fetch, num_computed_tokens: int) -> int:
        """The last prompt token is computed here in any case, for its logits: alone it is not worth a pull."""
        if num_computed_tokens >= request.num_prompt_tokens - 1:
            return 0
        return max(0, fetch.num_tokens - num_computed_tokens)

    def _worth(self, fetch: _Fetch) -> int:
        """Tokens from which a pull is cheaper than computing them. What prefill computed is always pulled: this engine
        is there for decoding."""
        return max(1, self._recompute_threshold if fetch.source == "decode" else 1)

    def _skip(self, source: Source, reason: str, num_tokens: int) -> None:
        if num_tokens:
            self.num_tokens_not_pulled[source, reason] += num_tokens

    # How pulls end.

    def _pull_done(self, event: PullDone) -> Sequence[ConnectorOutcome]:
        fetch = self._fetches.pop(event.request_id, None)
        if fetch is None:
            return ()
        self.num_pulls_done += 1
        self.num_tokens_pulled[fetch.source] += fetch.num_pulling
        self.num_bytes_pulled += event.num_bytes
        self.seconds_pulling += event.seconds
        return (Loaded(event.request_id),)

    def _pull_stalled(self, event: PullStalled) -> Sequence[ConnectorOutcome]:
        """The request goes on without its load; the blocks stay out of use until the read is known to be over."""
        fetch = self._fetches.pop(event.request_id, None)
        if fetch is None:
            return ()
        self.stalled[event.request_id] = fetch.local_block_ids
        return (self._load_failed(fetch, event.request_id, "timeout", event.detail, fetch.local_block_ids),)

    def _pull_failed(self, event: PullFailed) -> Sequence[ConnectorOutcome]:
        stalled = self.stalled.pop(event.request_id, None)
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
        self._skip(fetch.source, "failed", fetch.num_pulling)
        peer = fetch.peer
        # A claim that is refused is the other side's right: it needed the room, or the time was over.
        logger.log(
            logging.INFO if reason == "claim" else logging.WARNING,
            "pull failed request_id=%s peer=%s:%d reason=%s recompute=%s detail=%s",
            request_id, peer.host, peer.port, reason, self._recompute, detail,
        )  # fmt: skip
        message = f"the KV computed by {peer.host}:{peer.port} could not be loaded ({reason})"
        return LoadFailed(request_id, self._recompute, message, kept_block_ids)

    def _send_heartbeats(self) -> None:
        now = self._clock()
        due = {fetch.peer for fetch in self._fetches.values() if now >= fetch.heartbeat_due}
        if not due:
            return
        by_peer: dict[Peer, list[str]] = {}
        for fetch in self._fetches.values():
            # One message a peer: whoever shares it is renewed early and comes into step.
            if fetch.peer in due and fetch.source == "prefill":
                by_peer.setdefault(fetch.peer, []).append(fetch.remote.request_id)
                fetch.heartbeat_due = now + self._heartbeat_seconds
        for peer, remote_request_ids in by_peer.items():
            self._transport.renew(peer, remote_request_ids)


def _peer(remote: RemoteBlocks) -> Peer:
    return Peer(remote.engine_id, remote.host, remote.port)

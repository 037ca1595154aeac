"""The encoder-cache connector: encodings of pictures go from the engine that made them to those that need them.

    encoder    announces what a request's pictures became ──► in ec_transfer_params, through the router
    prefill    claims, reads and releases it, instead of encoding the picture itself

It is the KV connector's transport once more, with an agent of its own and the encoder cache for its memory. Each
announcement is a lease, for one reader, and revocable: whoever needs the room gives up those that nobody reads, the
oldest first. What a reader compares are the names of the blocks, made of the picture's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from connectors.base import (
    BlocksClaimed,
    BlocksReleased,
    ECOutcome,
    EncodingFailed,
    EncodingKey,
    EncodingLoaded,
    Picture,
    TransferRequest,
)
from connectors.lease import Ended, Leases
from connectors.reader import RELEASE_AFTER_FAILURE
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
from connectors.wire.transfer import ECItem, ECTransferParams

logger = logging.getLogger(__name__)


class Lender(Protocol):
    """The encoder cache, as far as a connector sees it."""

    def lend(self, key: EncodingKey) -> Sequence[int] | None:
        """Keep the blocks of an encoding until BlocksReleased names them; None if it is not there."""


@dataclass(frozen=True, slots=True)
class EncoderLayout:
    """What two engines must have in common to read each other's encodings, and what follows from it."""

    fingerprint: str
    rows_per_block: int
    width: int
    row_bytes: int


@dataclass(slots=True)
class _Announced:
    """An encoding that another engine has for one request of this one."""

    lease_id: str
    peer: Peer
    block_ids: tuple[int, ...]
    obstacle: str | None
    """Why it is not loaded from there, if so."""
    asked: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    key: EncodingKey
    announced: _Announced
    block_ids: tuple[int, ...]


class EncoderConnector:
    """Scheduler-side connector over any transport. Main thread only; the counters may be read from any."""

    def __init__(
        self,
        *,
        transport: Transport,
        leases: Leases,
        cache: Lender,
        layout: EncoderLayout,
        me: Peer,
        produces: bool,
        consumes: bool,
        lease_seconds: float,
    ) -> None:
        """`me` is what is announced: peers reach this engine there. `lease_seconds` is how long an announcement
        stands."""
        self.transport = transport
        self.leases = leases
        self.produces = produces
        self.consumes = consumes
        self._cache = cache
        self._layout = layout
        self._me = me
        self._lease_seconds = lease_seconds
        self._announced: dict[str, dict[EncodingKey, _Announced]] = {}
        """By request id."""
        self._loads: dict[str, _Load] = {}
        """Pulls that somebody waits for, by the name that the transport knows them by."""
        self.stalled: dict[str, tuple[int, ...]] = {}
        """Blocks of pulls that nobody waits for any longer, though they may still write to them."""
        self._pulls: list[Pull] = []
        self._num_named = 0

        self.num_pulls_done = 0
        self.num_bytes_pulled = 0
        self.seconds_pulling = 0.0
        self.num_pulls_failed: Counter[str] = Counter()
        """By the transport's reason, or overdue."""
        self.num_not_pulled = 0
        """Announcements given back unread."""

    # In the order of a request's life.

    def on_new_request(self, request: TransferRequest) -> None:
        params = request.ec_transfer_params
        if params is None or not request.media:
            return
        if not self.consumes:
            logger.warning("ec_transfer_params of request_id=%s are ignored: no ec_consumer", request.request_id)
            return
        announced = {}
        for picture in request.media:
            item = params.items.get(picture.identifier)
            if item is not None:
                announced[EncodingKey.of(picture)] = self._read(item, picture)
        self._announced[request.request_id] = announced

    def has_cache_item(self, request: TransferRequest, picture: Picture) -> bool:
        announced = self._find(request, picture)
        return announced is not None and announced.obstacle is None and not announced.asked

    def why_not(self, request: TransferRequest, picture: Picture) -> str | None:
        announced = self._find(request, picture)
        if announced is None:
            return None
        return announced.obstacle or ("lost" if announced.asked else None)

    def update_state_after_alloc(self, request: TransferRequest, picture: Picture, block_ids: Sequence[int]) -> None:
        announced, key = self._find(request, picture), EncodingKey.of(picture)
        assert announced is not None, f"{request.request_id}: nothing to load"
        announced.asked = True
        self._num_named += 1
        name = f"{request.request_id}/{self._num_named}"
        self._loads[name] = _Load(key, announced, tuple(block_ids))
        self._pulls.append(
            Pull(
                request_id=name,
                peer=announced.peer,
                remote_request_id=announced.lease_id,
                local_block_ids=tuple(block_ids),
                remote_block_ids=announced.block_ids,
                first_block=0,
                block_hashes=self._hashes(key),
                kv_layout=self._layout.fingerprint,
            )
        )

    def update_state_after_free(self, key: EncodingKey) -> bool:
        for name, load in list(self._loads.items()):
            if load.key == key:
                del self._loads[name]
                self.stalled[name] = load.block_ids
                self._failed(load, "overdue", "it took too long")
                return True
        return False

    def build_connector_meta(self) -> None:
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            self.transport.pull(pull)

    def request_finished(self, request: TransferRequest) -> ECTransferParams | None:
        kv = request.kv_transfer_params
        was_prefilled = kv is not None and bool(kv.do_remote_prefill)  # by who had the announcements before
        for announced in self._announced.pop(request.request_id, {}).values():
            if not (announced.asked or was_prefilled or announced.obstacle == "incomplete"):
                self.num_not_pulled += 1
                self.transport.release(announced.peer, announced.lease_id)
        if not self.produces or not request.handed_off:
            return None
        places: dict[EncodingKey, list[int]] = {}
        for index, picture in enumerate(request.media):
            places.setdefault(EncodingKey.of(picture), []).append(index)
        items = {
            key.identifier: item
            for key, indices in places.items()
            if (item := self._announce(request, key, indices)) is not None
        }
        return ECTransferParams.parse(items) if items else None

    def revoke(self) -> BlocksReleased | None:
        ended = self.leases.revoke_oldest()
        return None if ended is None else _released(ended)

    def settle(self, event: TransferEvent) -> Sequence[ECOutcome]:
        if isinstance(event, PullDone):
            return self._pull_done(event)
        if isinstance(event, PullStalled):
            return self._pull_stalled(event)
        if isinstance(event, PullFailed):
            return self._pull_failed(event)
        if isinstance(event, LeaseReleased):
            ended = self.leases.release(event.request_id)
            return () if ended is None else (_released(ended),)
        if isinstance(event, LeasesRenewed):
            self.leases.renew(event.request_ids)
            return ()
        assert_never(event)

    def lease_changes(self, now: float) -> Sequence[ECOutcome]:
        expired = [_released(ended) for ended in self.leases.expire(now)]
        return [*expired, *(BlocksClaimed(block_ids) for block_ids in self.leases.take_claimed())]

    def next_wakeup(self) -> float | None:
        return self.leases.next_expiry()

    def close(self) -> None:
        self.transport.close()

    # What is announced to this engine, and what by it.

    def _find(self, request: TransferRequest, picture: Picture) -> _Announced | None:
        return self._announced.get(request.request_id, {}).get(EncodingKey.of(picture))

    def _read(self, item: ECItem, picture: Picture) -> _Announced:
        peer = Peer(item.engine_id or "", item.peer_host or "", item.peer_port or 0)
        block_ids = tuple(item.block_ids or ())
        return _Announced(item.lease_id or "", peer, block_ids, self._obstacle(item, picture, peer))

    def _obstacle(self, item: ECItem, picture: Picture, peer: Peer) -> str | None:
        """What is announced must be what this engine's own encoder would make."""
        if not (item.lease_id and peer.engine_id and peer.host and peer.port and item.block_ids):
            return "incomplete"
        if item.ec_layout != self._layout.fingerprint:
            return "layout"
        if item.shape != [picture.num_rows, self._layout.width]:
            return "shape"
        if item.size_bytes != picture.num_rows * self._layout.row_bytes:
            return "shape"
        if len(item.block_ids) != -(-picture.num_rows // self._layout.rows_per_block):
            return "shape"
        return "self" if peer.engine_id == self._me.engine_id else None

    def _announce(self, request: TransferRequest, key: EncodingKey, indices: list[int]) -> ECItem | None:
        block_ids = self._cache.lend(key)
        if block_ids is None:
            return None
        picture, lease_id = request.media[indices[0]], f"{request.request_id}/{indices[0]}"
        self.leases.hold(lease_id, block_ids, self._hashes(key), self._lease_seconds, revocable=True)
        return ECItem(
            modality=picture.modality,
            metadata=dict(picture.metadata),
            item_indices=indices,
            peer_host=self._me.host,
            peer_port=self._me.port,
            size_bytes=key.num_rows * self._layout.row_bytes,
            shape=[key.num_rows, self._layout.width],
            engine_id=self._me.engine_id,
            lease_id=lease_id,
            block_ids=list(block_ids),
            ec_layout=self._layout.fingerprint,
        )

    def _hashes(self, key: EncodingKey) -> tuple[str, ...]:
        return tuple(name.hex() for name in key.block_names(self._layout.rows_per_block))

    # How pulls end.

    def _pull_done(self, event: PullDone) -> Sequence[ECOutcome]:
        if (load := self._loads.pop(event.request_id, None)) is None:
            return self._stall_ended(event.request_id)
        self.num_pulls_done += 1
        self.num_bytes_pulled += event.num_bytes
        self.seconds_pulling += event.seconds
        return (EncodingLoaded(load.key),)

    def _pull_stalled(self, event: PullStalled) -> Sequence[ECOutcome]:
        if (load := self._loads.pop(event.request_id, None)) is None:
            return ()
        self.stalled[event.request_id] = load.block_ids
        self._failed(load, "timeout", event.detail)
        return (EncodingFailed(load.key, kept=True),)

    def _pull_failed(self, event: PullFailed) -> Sequence[ECOutcome]:
        if (load := self._loads.pop(event.request_id, None)) is None:
            return self._stall_ended(event.request_id)
        self._failed(load, event.reason, event.detail)
        if event.reason in RELEASE_AFTER_FAILURE:
            self.transport.release(load.announced.peer, load.announced.lease_id)
        return (EncodingFailed(load.key),)

    def _stall_ended(self, name: str) -> Sequence[ECOutcome]:
        block_ids = self.stalled.pop(name, None)
        return () if block_ids is None else (BlocksReleased(block_ids),)

    def _failed(self, load: _Load, reason: str, detail: str) -> None:
        load.announced.obstacle = reason
        self.num_pulls_failed[reason] += 1
        peer = load.announced.peer
        logger.log(
            logging.INFO if reason == "claim" else logging.WARNING,
            "an encoding was not read lease=%s peer=%s:%d reason=%s detail=%s",
            load.announced.lease_id, peer.host, peer.port, reason, detail,
        )  # fmt: skip


def _released(ended: Ended) -> BlocksReleased:
    return BlocksReleased(ended.block_ids, ended.idle)

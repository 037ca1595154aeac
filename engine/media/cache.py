"""The encoder cache: which encodings are in which blocks of the arena, who needs them, and what may be evicted.

An encoding that somebody needs is *in use*: wanted (its blocks are there, it is not encoded yet), loading (another
engine's is being read into them) or ready. It stays as long as a request needs it. One that nobody needs stays findable
until its blocks are wanted for another, the one longest unused first. Blocks of an announced encoding are lent: they
stay until they are read, or until the room is needed and nobody reads them.

All of that is what a pool of KV blocks does, with the parts of an encoding in the place of hashed tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from connectors.base import BlocksReleased, EncodingKey
from engine.blocks import BlockPool
from engine.media.item import MediaItem

Revoke = Callable[[], BlocksReleased | None]


class EncodingState(enum.Enum):
    WANTED = "wanted"
    LOADING = "loading"
    READY = "ready"


@dataclass(eq=False, slots=True)
class Encoding:
    """One that is in use."""

    key: EncodingKey
    block_ids: list[int]
    state: EncodingState
    picture: MediaItem | None = None
    """What to encode, of whichever request brought it; None if nobody has seen the picture here."""
    users: set[str] = field(default_factory=set)
    """Ids of the requests that need it."""


class EncoderCacheManager:
    """Owned by the engine's main thread; the counters may be read from any."""

    def __init__(self, num_blocks: int, rows_per_block: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.rows_per_block = rows_per_block
        self.in_use: dict[EncodingKey, Encoding] = {}
        self._held: dict[str, dict[EncodingKey, None]] = {}
        """By request id, what it needs."""
        self.num_queries = 0
        """Encodings that requests came to need."""
        self.num_hits = 0
        """Those of them that were there, or on their way for somebody else."""

    def num_blocks(self, keys: Iterable[EncodingKey]) -> int:
        """Blocks that these take, each once."""
        return sum(-(-key.num_rows // self.rows_per_block) for key in set(keys))

    def state(self, key: EncodingKey) -> EncodingState | None:
        """None if it is neither in use nor kept."""
        encoding = self.in_use.get(key)
        if encoding is not None:
            return encoding.state
        return None if self._kept(key) is None else EncodingState.READY

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    def acquire(self, request_id: str, pictures: Sequence[MediaItem], revoke: Revoke) -> bool:
        """Let a request have these encodings, all or none; new ones are wanted. `revoke` gives up what was lent and is
        not read, if the room is needed. False if there is no room.
        """
        held = self._held.get(request_id, {})
        missing = {key: picture for picture in pictures if (key := EncodingKey.of(picture)) not in held}
        kept = {key: block_ids for key in missing if key not in self.in_use and (block_ids := self._kept(key))}
        new = [key for key in missing if key not in self.in_use and key not in kept]
        revived = [block_id for block_ids in kept.values() for block_id in block_ids]
        if self.num_blocks(new) > self.pool.num_available - self.pool.num_revived(revived):
            return False
        self.pool.take(revived)  # first, for they may be among what is revoked for the rest
        if not self._reclaim(self.num_blocks(new), revoke):
            self.pool.free(revived)
            return False
        for key in new:
            self.in_use[key] = Encoding(key, self.pool.allocate(self.num_blocks([key])), EncodingState.WANTED)
        for key, block_ids in kept.items():
            self.in_use[key] = Encoding(key, block_ids, EncodingState.READY)
        self.num_queries += len(missing)
        self.num_hits += len(missing) - len(new)
        for picture in pictures:
            self._use(request_id, self.in_use[EncodingKey.of(picture)], picture)
        return True

    def loading(self, key: EncodingKey) -> list[int]:
        """A wanted encoding is being read from another engine, into the blocks that are returned."""
        encoding = self.in_use[key]
        assert encoding.state is EncodingState.WANTED, f"{key.identifier} is {encoding.state.value}"
        encoding.state = EncodingState.LOADING
        return encoding.block_ids

    def filled(self, key: EncodingKey) -> bool:
        """A wanted or loading encoding is in its blocks now. False if nobody has heard of it."""
        encoding = self.in_use.get(key)
        if encoding is None:
            return False
        encoding.state, encoding.picture = EncodingState.READY, None
        for block_id, name in zip(encoding.block_ids, key.block_names(self.rows_per_block), strict=True):
            self.pool.cache(block_id, name)
        self._end_if_unused(encoding)
        return True

    def drop(self, key: EncodingKey, *, kept: bool) -> None:
        """It did not come. Whoever needed it has it no more; its blocks are free, unless `kept` back by the caller."""
        encoding = self.in_use.pop(key)
        for request_id in encoding.users:
            self._forget(request_id, key)
        if not kept:
            self.pool.free(encoding.block_ids)

    def release(self, request_id: str, still_needed: Iterable[EncodingKey] = ()) -> None:
        """A request needs no more than these of the encodings it had."""
        for key in self._held.get(request_id, {}).keys() - set(still_needed):
            self._forget(request_id, key)
            encoding = self.in_use[key]
            encoding.users.remove(request_id)
            self._end_if_unused(encoding)

    def lend(self, key: EncodingKey) -> list[int] | None:
        """Keep the blocks of a ready encoding for a reader that may come, until they are released or revoked; None if
        it is not there."""
        encoding = self.in_use.get(key)
        if encoding is None:
            block_ids = self._kept(key)
        else:
            block_ids = encoding.block_ids if encoding.state is EncodingState.READY else None
        if block_ids is not None:
            self.pool.take(block_ids)
            self.pool.idle(block_ids)
        return block_ids

    def returned(self, released: BlocksReleased) -> None:
        """Blocks that were lent, or kept back from a load that failed, are no longer needed."""
        if released.idle:
            self.pool.pin(released.block_ids)
        self.pool.free(released.block_ids)

    def _kept(self, key: EncodingKey) -> list[int] | None:
        names = key.block_names(self.rows_per_block)
        block_ids = self.pool.match(names)
        return block_ids if len(block_ids) == len(names) else None

    def _reclaim(self, count: int, revoke: Revoke) -> bool:
        while count > self.pool.num_free:
            revoked = revoke()
            if revoked is None:
                return False
            self.returned(revoked)
        return True

    def _use(self, request_id: str, encoding: Encoding, picture: MediaItem) -> None:
        encoding.users.add(request_id)
        self._held.setdefault(request_id, {})[encoding.key] = None
        if encoding.state is not EncodingState.READY and encoding.picture is None and picture.pixels is not None:
            encoding.picture = picture

    def _forget(self, request_id: str, key: EncodingKey) -> None:
        held = self._held[request_id]
        del held[key]
        if not held:
            del self._held[request_id]

    def _end_if_unused(self, encoding: Encoding) -> None:
        """A load goes on without anybody who needs it: its blocks are being written to."""
        if not encoding.users and encoding.state is not EncodingState.LOADING:
            del self.in_use[encoding.key]
            self.pool.free(encoding.block_ids)

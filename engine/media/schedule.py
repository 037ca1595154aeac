"""What pictures mean for the schedule: when a request may run, what a step encodes, and where a chunk of tokens ends.

A request is admitted only with room for all the encodings it needs, and gives each up once its placeholders are
computed. So no request that runs ever waits for room in the encoder cache, and who waits for KV blocks waits for
requests that go on. Encodings on their way from another engine take room too, for a request that does not run yet;
those that have come are given up if a request before it in the queue needs the room.

Nothing here looks at a picture, nor needs torch.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from connectors.base import (
    BlocksClaimed,
    BlocksReleased,
    ECConnector,
    ECOutcome,
    EncodingKey,
    EncodingLoaded,
    NullECConnector,
)
from connectors.transport import TransferEvent
from engine.batch import Batch, ScheduledRequest
from engine.media.cache import EncoderCacheManager, Encoding, EncodingState
from engine.media.item import MediaItem
from engine.request import Request


class Availability(enum.Enum):
    """How it stands with the encodings that a request needs."""

    READY = "ready"
    """They are there, or will be made in the steps that need them."""
    UNDER_WAY = "under way"
    """Some are on their way from another engine."""
    NO_ROOM = "no room"
    NEVER = "never"
    """One can neither be loaded nor be made here."""


class EncodingUnavailable(Exception):
    """An encoding that a request needs can neither be loaded nor be made here."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class MediaSchedule:
    """The part of the scheduler that knows about pictures. Main thread only; the counters may be read from any."""

    def __init__(
        self,
        cache: EncoderCacheManager,
        connector: ECConnector | None = None,
        *,
        max_rows_per_step: int = 512,
        wait_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_rows_per_step` is what a step encodes at most, if it is more than one picture. `wait_seconds` is what a
        request waits for encodings from elsewhere, all tries together."""
        self.cache = cache
        self.connector = connector or NullECConnector()
        self._max_rows_per_step = max_rows_per_step
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._awaited: dict[str, set[EncodingKey]] = {}
        """By request id, the loads that have to end before it can go on."""
        self._deadlines: dict[str, float] = {}
        """By request id, from its first wait on."""
        self._early: dict[str, None] = {}
        """Requests that hold encodings and do not run."""
        self.fetching: dict[str, Request] = {}
        """Requests for which encodings are under way; they stand in no queue meanwhile."""
        self._arrived: list[Request] = []
        self._encode: dict[EncodingKey, MediaItem] = {}
        """What this step encodes."""
        self._filling: list[Encoding] = []
        """Into whose blocks."""
        self._encodings: dict[str, Sequence[int]] = {}

        self.num_encoded = 0
        self.num_fallbacks: Counter[str] = Counter()
        """Pictures encoded here though another engine had announced them, by reason."""
        self.num_unavailable: Counter[str] = Counter()
        """Pictures that could not be encoded here either, and failed their request, by the same reasons."""

    def obstacle(self, request: Request) -> str | None:
        """Why the pictures of this request can never be served, if so."""
        needed = self.cache.num_blocks(map(EncodingKey.of, request.media))
        if needed <= self.cache.pool.num_blocks:
            return None
        return (
            f"the pictures of this request take {needed} blocks of the encoder cache, which has "
            f"{self.cache.pool.num_blocks}: send fewer or smaller ones, or raise --encoder-cache-bytes"
        )

    def fitting(self, request: Request) -> Sequence[MediaItem]:
        """The pictures of this request up to the first with which the cache cannot hold them at one time."""
        keys: set[EncodingKey] = set()
        for number, picture in enumerate(request.media):
            keys.add(EncodingKey.of(picture))
            if self.cache.num_blocks(keys) > self.cache.pool.num_blocks:
                return request.media[:number]
        return request.media

    # Before a request runs.

    def ensure_cache_available(self, request: Request, num_have: int, *, is_next: bool) -> Availability:
        """See to the encodings of a request in the queue, of which the KV of `num_have` tokens need not be computed.
        What other engines have is fetched. If some is UNDER_WAY, the request is one of those that are `fetching` until
        `take_arrived` returns it: then ask again.

        The request that `is_next` to be admitted gets everything it needs, in the room of those behind it if there is
        no other. One that came in just now may only begin to fetch.

        Raises EncodingUnavailable.
        """
        needed = self._needed(request, num_have)
        if not needed:
            return Availability.READY
        if self._overdue(request.request_id):
            for key in needed:
                if self.cache.state(key) is EncodingState.LOADING:
                    self._give_up(key)
        loads = self._loads(request, needed)
        under_way = loads.keys() | {key for key in needed if self.cache.state(key) is EncodingState.LOADING}
        if not (under_way or is_next):
            return Availability.READY
        if not self._acquire(request, needed, loads, is_next=is_next):
            return Availability.NO_ROOM
        self._early[request.request_id] = None
        if not under_way:
            return Availability.READY
        for key, picture in loads.items():
            self.connector.update_state_after_alloc(request, picture, self.cache.loading(key))
        self.fetching[request.request_id] = request
        self._awaited[request.request_id] = under_way
        self._deadlines.setdefault(request.request_id, self._clock() + self._wait_seconds)
        return Availability.UNDER_WAY

    def admitted(self, request: Request) -> None:
        """It has its KV blocks too: nobody takes its encodings from it."""
        self._early.pop(request.request_id, None)

    def take_arrived(self) -> list[Request]:
        """Requests that need not wait any longer, since the last call."""
        arrived, self._arrived = self._arrived, []
        return [request for request in arrived if not request.status.finished]

    # A step.

    def begin_step(self) -> None:
        self._encode, self._filling, self._encodings = {}, [], {}

    def chunk(self, request: Request, start: int, count: int) -> int:
        """How many of `count` tokens from `start` on can be computed in this step: none of a picture's placeholders
        before it is encoded."""
        encode = set(self._encode)
        for picture, first in _within(request.media, start, start + count):
            key = EncodingKey.of(picture)
            if key in encode or self.cache.state(key) is EncodingState.READY:
                continue
            if encode and sum(each.num_rows for each in (*encode, key)) > self._max_rows_per_step:
                return first - start
            encode.add(key)
        return count

    def give(self, request: Request, start: int, count: int) -> bool:
        """These tokens are computed in this step, and what `chunk` counted on is encoded. Whether there is any."""
        encodes = False
        for picture, _ in _within(request.media, start, start + count):
            key = EncodingKey.of(picture)
            encoding = self.cache.in_use[key]
            self._encodings[key.identifier] = encoding.block_ids
            if encoding.state is not EncodingState.READY:
                assert encoding.picture is not None, f"{key.identifier}: nobody has the picture"
                if key not in self._encode:
                    self._encode[key] = encoding.picture
                    self._filling.append(encoding)
                encodes = True
        return encodes

    def ready(self, request: Request) -> bool:
        """Whether all its pictures are encoded."""
        return all(self.cache.state(EncodingKey.of(picture)) is EncodingState.READY for picture in request.media)

    def batch(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        return Batch(scheduled, tuple(self._encode.values()), self._encodings)

    def encoded(self) -> None:
        """The step was computed."""
        self.num_encoded += len(self._encode)
        for encoding in self._filling:
            # If all who needed it left during the step, another of that name may be wanted since, in other blocks.
            if self.cache.in_use.get(encoding.key) is encoding:
                self.cache.filled(encoding.key)
        self._encode, self._filling = {}, []

    def computed(self, request: Request) -> None:
        """Of a request that runs, more tokens are computed: the encodings of the pictures before them can go."""
        if self.cache.holds(request.request_id):
            self.cache.release(request.request_id, self._needed(request, request.num_computed_tokens))

    def free(self, request: Request) -> None:
        """The request does not run any longer, or not now; if it goes on, it acquires its encodings anew."""
        self.cache.release(request.request_id)
        self.fetching.pop(request.request_id, None)
        self._awaited.pop(request.request_id, None)
        self._early.pop(request.request_id, None)
        if request.status.finished:
            self._deadlines.pop(request.request_id, None)

    # What comes from outside.

    def settle(self, event: TransferEvent) -> None:
        self._apply(self.connector.settle(event))

    def update_leases(self, now: float) -> None:
        self._apply(self.connector.lease_changes(now))
        for request_id in [each for each in self._awaited if now >= self._deadlines[each]]:
            for key in self._awaited.get(request_id, frozenset()).copy():
                self._give_up(key)

    def next_wakeup(self) -> float | None:
        due = [self._deadlines[request_id] for request_id in self._awaited]
        at = self.connector.next_wakeup()
        return min(due if at is None else [*due, at], default=None)

    def _apply(self, outcomes: Iterable[ECOutcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, BlocksReleased):
                self.cache.returned(outcome)
            elif isinstance(outcome, BlocksClaimed):
                self.cache.pool.pin(outcome.block_ids)
            else:
                if isinstance(outcome, EncodingLoaded):
                    self.cache.filled(outcome.key)
                else:
                    self.cache.drop(outcome.key, kept=outcome.kept)
                self._load_ended(outcome.key)

    def _give_up(self, key: EncodingKey) -> None:
        """The load has taken too long; whoever waits for it tries something else."""
        self.cache.drop(key, kept=self.connector.update_state_after_free(key))
        self._load_ended(key)

    def _load_ended(self, key: EncodingKey) -> None:
        for request_id, keys in list(self._awaited.items()):
            keys.discard(key)
            if not keys:
                del self._awaited[request_id]
                self._arrived.append(self.fetching.pop(request_id))

    # What is needed, and how it can be had.

    def _needed(self, request: Request, num_have: int) -> dict[EncodingKey, MediaItem]:
        """The pictures of a request with a placeholder among the tokens that are to be computed. The last token always
        is."""
        start = min(num_have, request.num_tokens - 1)
        return {EncodingKey.of(picture): picture for picture in request.media if picture.positions[-1] >= start}

    def _loads(self, request: Request, needed: dict[EncodingKey, MediaItem]) -> dict[EncodingKey, MediaItem]:
        """Those of them that are to be loaded. Raises EncodingUnavailable if one can be had in no way."""
        overdue = self._overdue(request.request_id)
        loads = {}
        for key, picture in needed.items():
            if self.cache.state(key) is not None:
                continue
            if not overdue and self.connector.has_cache_item(request, picture):
                loads[key] = picture
            elif picture.pixels is None:
                raise self._unavailable(request, picture, overdue)
        return loads

    def _unavailable(self, request: Request, picture: MediaItem, overdue: bool) -> EncodingUnavailable:
        number = request.media.index(picture) + 1
        reason = self._why_not(request, picture, overdue)
        if reason is None:
            params = request.ec_transfer_params
            if params is None or picture.identifier not in params.items:
                said = "ec_transfer_params do not say where its encoding is"
                return EncodingUnavailable(f"picture {number} is only described, and {said}", 400)
            reason = "disabled"
        self.num_unavailable[reason] += 1
        return EncodingUnavailable(f"the encoding of picture {number} could not be loaded ({reason}); try again", 500)

    def _why_not(self, request: Request, picture: MediaItem, overdue: bool) -> str | None:
        return self.connector.why_not(request, picture) or ("overdue" if overdue else None)

    def _acquire(
        self,
        request: Request,
        needed: dict[EncodingKey, MediaItem],
        loads: dict[EncodingKey, MediaItem],
        *,
        is_next: bool,
    ) -> bool:
        new = [picture for key, picture in needed.items() if key not in loads and self.cache.state(key) is None]
        pictures = list(needed.values())
        while not self.cache.acquire(request.request_id, pictures, self.connector.revoke):
            behind = [each for each in self._early if each != request.request_id and each not in self._awaited]
            if not is_next or not behind:
                return False
            self.cache.release(behind[-1])
            del self._early[behind[-1]]
        overdue = self._overdue(request.request_id)
        for picture in new:
            if reason := self._why_not(request, picture, overdue):
                self.num_fallbacks[reason] += 1
        return True

    def _overdue(self, request_id: str) -> bool:
        deadline = self._deadlines.get(request_id)
        return deadline is not None and self._clock() >= deadline


def _within(media: Sequence[MediaItem], start: int, end: int) -> Iterable[tuple[MediaItem, int]]:
    """The pictures with placeholders from `start` to `end`, and where the first of these is."""
    for picture in media:
        if picture.positions[-1] >= start:
            first = picture.positions[bisect_left(picture.positions, start)]
            if first < end:
                yield picture, first

"""Engines whose requests have pictures, without threads, sockets or a model; and one that only encodes."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from connectors.base import EncodingKey
from connectors.ec import EncoderConnector, EncoderLayout
from connectors.fake import FakeNetwork, FakeTransport
from connectors.lease import Leases
from connectors.transport import Peer, TransferEvent
from connectors.wire.transfer import ECTransferParams
from engine.batch import StepResult
from engine.media.cache import EncoderCacheManager, EncodingState
from engine.media.encode_only import EncodeScheduler
from engine.media.schedule import MediaSchedule
from engine.messages import Output, Stop
from engine.request import Request
from tests.fake_engines import CLAIM_SECONDS, LEASE_SECONDS, FakeEngine
from tests.media_runner import FakeEncoderMemory, MediaRunner, encode, picture_request

ROWS_PER_BLOCK = 2
WIDTH = 8
ROW_BYTES = 4 * WIDTH
EC_LAYOUT = "encodings-1"
WAIT_SECONDS = 60.0


class EncoderParts:
    """What two kinds of engines have in common: memory, cache, connector, and the schedule over them."""

    def __init__(
        self,
        network: FakeNetwork,
        name: str,
        *,
        num_blocks: int,
        produces: bool,
        consumes: bool,
        max_rows_per_step: int,
        layout: str,
    ) -> None:
        self.memory = FakeEncoderMemory(num_blocks, ROWS_PER_BLOCK)
        self.cache = EncoderCacheManager(num_blocks, ROWS_PER_BLOCK)
        self.leases = Leases(claim_seconds=CLAIM_SECONDS, clock=network.clock)
        self.events: deque[TransferEvent] = deque()
        peer = Peer(f"{name}-ec", f"{name}.test", 8200)
        self.transport = FakeTransport(
            network, peer, memory=self.memory, leases=self.leases, emit=self.events.append, kv_layout=layout
        )
        self.connector = EncoderConnector(
            transport=self.transport,
            leases=self.leases,
            cache=self.cache,
            layout=EncoderLayout(layout, ROWS_PER_BLOCK, WIDTH, ROW_BYTES),
            me=peer,
            produces=produces,
            consumes=consumes,
            lease_seconds=LEASE_SECONDS,
        )
        self.schedule = MediaSchedule(
            self.cache,
            self.connector,
            max_rows_per_step=max_rows_per_step,
            wait_seconds=WAIT_SECONDS,
            clock=network.clock,
        )

    def settle(self) -> None:
        while self.events:
            self.schedule.settle(self.events.popleft())

    def check(self) -> None:
        """Every block is used by whom the cache says, and no other."""
        cache, pool = self.cache, self.cache.pool
        uses: Counter[int] = Counter()
        for encoding in cache.in_use.values():
            uses.update(encoding.block_ids)
            assert encoding.users or encoding.state is EncodingState.LOADING, "in use by nobody"
        for lease in self.leases._leases.values():
            uses.update(lease.block_ids)
        for block_ids in self.connector.stalled.values():
            uses.update(block_ids)
        assert {block.block_id: block.ref_count for block in pool.blocks if block.ref_count} == dict(uses)
        held = {(request_id, key) for request_id, keys in cache._held.items() for key in keys}
        assert held == {(user, key) for key, encoding in cache.in_use.items() for user in encoding.users}

    def check_idle(self) -> None:
        """Nothing is needed, awaited or on its way."""
        assert not self.cache.in_use
        assert not self.cache._held
        assert not self.connector._announced
        assert not self.connector._loads
        assert not self.connector.stalled
        schedule = self.schedule
        assert not any((schedule.fetching, schedule._awaited, schedule._deadlines, schedule._early))
        assert self.cache.pool.num_available == self.cache.pool.num_blocks


class MediaEngine(FakeEngine):
    """A whole engine whose model takes pictures."""

    def __init__(
        self,
        *,
        network: FakeNetwork | None = None,
        name: str = "p",
        encoder_blocks: int = 32,
        produces: bool = False,
        consumes: bool = True,
        max_rows_per_step: int = 64,
        ec_layout: str = EC_LAYOUT,
        kv: bool = False,
        **options: Any,
    ) -> None:
        """kv: it exchanges KV too."""
        ec_network = network or FakeNetwork()
        self.encoder = EncoderParts(
            ec_network,
            name,
            num_blocks=encoder_blocks,
            produces=produces,
            consumes=consumes,
            max_rows_per_step=max_rows_per_step,
            layout=ec_layout,
        )
        super().__init__(network=ec_network if kv else None, name=name, media=self.encoder.schedule, **options)
        self.network = ec_network
        self.runner: MediaRunner = MediaRunner(self.kv, self.encoder.memory)

    def ask(self, *parts: int | tuple[str, int] | str, **options: Any) -> Request:
        """Submit a prompt with pictures; see `picture_request`."""
        return self.add(picture_request(*parts, **options))

    def settle(self) -> None:
        super().settle()
        self.encoder.settle()

    def check(self) -> None:
        super().check()
        self.encoder.check()

    def check_idle(self) -> None:
        super().check_idle()
        self.encoder.check_idle()

    @property
    def media(self) -> MediaSchedule:
        return self.scheduler.media


class EncodeEngine:
    """An engine that only encodes."""

    def __init__(
        self,
        network: FakeNetwork,
        *,
        name: str = "e",
        encoder_blocks: int = 32,
        max_rows_per_step: int = 64,
        ec_layout: str = EC_LAYOUT,
    ) -> None:
        self.network = network
        self.encoder = EncoderParts(
            network,
            name,
            num_blocks=encoder_blocks,
            produces=True,
            consumes=False,
            max_rows_per_step=max_rows_per_step,
            layout=ec_layout,
        )
        self.scheduler = EncodeScheduler(self.encoder.schedule, clock=network.clock)
        self.encoded: Counter[str] = Counter()
        self.batches: list[list[str]] = []
        self.finals: dict[str, Output] = {}

    def ask(self, *parts: int | tuple[str, int] | str, **options: Any) -> Request:
        request = picture_request(*parts, **options)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.stop(Stop(request.request_id, aborted=True))

    def step(self) -> bool:
        self.encoder.settle()
        self.scheduler.update_leases(self.network.clock())
        batch = self.scheduler.schedule()
        self.encoder.check()
        if batch is not None:
            encode(batch, self.encoder.memory, self.encoded)
            self.batches.append([picture.identifier for picture in batch.encode])
            assert all(item.num_tokens == 0 for item in batch.scheduled)
            self.scheduler.finish_step(batch, StepResult([]))
        for output in self.scheduler.take_outputs():
            self.finals[output.request_id] = output
        self.encoder.check()
        return batch is not None

    def run(self) -> None:
        for _ in range(1000):
            self.step()
            if not self.scheduler.requests:
                return
        raise AssertionError("stuck")

    def final(self, request: Request) -> Output:
        return self.finals[request.request_id]

    def announce(self, *parts: int | tuple[str, int] | str, **options: Any) -> ECTransferParams:
        """A whole encoder leg; the params of its answer, as they arrive at the router."""
        request = self.ask(*parts, **options)
        self.run()
        params = self.final(request).ec_transfer_params
        assert params is not None, f"nothing is announced: {self.final(request).error}"
        return ECTransferParams.parse(params.to_json())

    def evict(self) -> None:
        """Whatever was announced and is not being read, is gone."""
        while (revoked := self.encoder.connector.revoke()) is not None:
            self.encoder.cache.returned(revoked)

    def check_idle(self) -> None:
        assert not self.scheduler.requests
        self.encoder.check_idle()


def pair(
    *, encoder: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None
) -> tuple[EncodeEngine, MediaEngine, FakeNetwork]:
    """An encoder and an engine that fetches from it, on one network."""
    network = FakeNetwork()
    return EncodeEngine(network, **(encoder or {})), MediaEngine(network=network, **(consumer or {})), network


def key(name: str, rows: int = 4) -> EncodingKey:
    return EncodingKey(name, rows)


def changed(params: ECTransferParams, name: str, **changes: Any) -> ECTransferParams:
    """The same announcements, one of them told wrongly."""
    told = params.to_json()
    told[name] |= changes
    return ECTransferParams.parse(told)


def merged(*announced: ECTransferParams) -> ECTransferParams:
    first, *others = announced
    for each in others:
        first = first.merge(each)
    return first

"""Whole engines without threads, sockets or a model: scheduler, connector and leases over a FakeNetwork."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from connectors.base import NullConnector
from connectors.fake import FakeNetwork, FakeTransport
from connectors.kv import KVConnector
from connectors.lease import Leases
from connectors.transport import Peer, TransferEvent
from connectors.wire.transfer import KVTransferParams
from engine.blocks import BlockPool
from engine.logprobs import TokenLogprobs
from engine.media.schedule import MediaSchedule
from engine.messages import Output, Stop
from engine.request import Request
from engine.scheduler import Scheduler
from tests.fake_runner import BLOCK_SIZE, FakeKV, FakeRunner, kv_of, make_request

LAYOUT = "layout-1"
LEASE_SECONDS = 6.0
CLAIM_SECONDS = 4.0
OFFER_SECONDS = 100.0


class FakeEngine:
    """One engine; `step` is one turn of its loop, after which its invariants have been checked."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 10_000,
        block_size: int = BLOCK_SIZE,
        enable_prefix_caching: bool = True,
        network: FakeNetwork | None = None,
        role: str = "both",
        name: str = "engine",
        policy: str = "recompute",
        kv_layout: str = LAYOUT,
        lease_seconds: float = LEASE_SECONDS,
        bidirectional: bool = True,
        recompute_threshold: int = 0,
        offer_seconds: float = OFFER_SECONDS,
        clock_offset: float = 0.0,
        scheduling_policy: str = "fcfs",
        media: MediaSchedule | None = None,
    ) -> None:
        """`clock_offset` is what this engine's clock is ahead of the network's."""
        self.network = network or FakeNetwork()
        self.clock = lambda: self.network.clock.now + clock_offset
        self.kv = FakeKV(num_blocks, block_size)
        self.runner = FakeRunner(self.kv)
        self.pool = BlockPool(num_blocks)
        self.events: deque[TransferEvent] = deque()
        self.leases = Leases(claim_seconds=CLAIM_SECONDS, clock=self.clock)
        self.connector: KVConnector | NullConnector = NullConnector()
        if network is not None:
            peer = Peer(name, f"{name}.test", 8100)
            self.transport = FakeTransport(
                network, peer, memory=self.kv, leases=self.leases, emit=self.events.append, kv_layout=kv_layout
            )
            self.connector = KVConnector(
                transport=self.transport,
                leases=self.leases,
                role=role,
                engine_id=peer.engine_id,
                host=peer.host,
                port=peer.port,
                block_size=block_size,
                kv_layout=kv_layout,
                lease_seconds=lease_seconds,
                load_failure_policy=policy,
                bidirectional=bidirectional,
                recompute_threshold=recompute_threshold,
                offer_seconds=offer_seconds,
                clock=self.clock,
            )
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            pool=self.pool,
            connector=self.connector,
            media=media,
            enable_prefix_caching=enable_prefix_caching,
            policy=scheduling_policy,
            clock=self.clock,
        )
        self.tokens: dict[str, list[int]] = {}
        """Output so far, per request."""
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        """One for each of these tokens, of requests that asked."""
        self.prompt_logprobs: dict[str, Sequence[TokenLogprobs | None]] = {}
        self.finals: dict[str, Output] = {}
        self.filled: dict[bytes, tuple[bytes, ...]] = {}
        """Block hash -> the KV a block of that name must hold."""

    # Traffic

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        return request

    def submit(self, prompt: Sequence[int], **options) -> Request:
        return self.add(make_request(prompt, block_size=self.kv.block_size, **options))

    def abort(self, request: Request) -> None:
        self.scheduler.stop(Stop(request.request_id, aborted=True))

    def settle(self) -> None:
        """Take in what the transport has reported so far."""
        while self.events:
            self.scheduler.settle(self.events.popleft())

    def step(self, *, during=None) -> bool:
        """One turn of the loop; False if there was nothing to compute. `during` runs while the step does."""
        self.settle()
        self.scheduler.update_leases(self.clock())
        batch = self.scheduler.schedule()
        if batch is not None:
            self.check()
            sampled = self.runner.run(batch)
            if during is not None:
                during()
            self.scheduler.finish_step(batch, sampled)
        self.collect()
        self.check()
        return batch is not None

    def collect(self) -> None:
        for output in self.scheduler.take_outputs():
            assert output.request_id not in self.finals, f"{output.request_id} goes on after its end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.prompt_logprobs, "told twice"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            if output.finished:
                self.finals[output.request_id] = output

    def run(self, *, max_steps: int = 2_000) -> None:
        """Step until every request has ended, letting time pass whenever nothing can be computed."""
        for _ in range(max_steps):
            if not self.scheduler.requests and not self.scheduler.loading:
                return
            if not self.step():
                self.network.advance(0.5)
        raise AssertionError(f"stuck: {[(r.request_id, r.status) for r in self.scheduler.requests.values()]}")

    def answer(self, request: Request) -> list[int]:
        assert request.request_id in self.finals, f"{request.request_id} has not ended: {request.status}"
        return self.tokens[request.request_id]

    def final(self, request: Request) -> Output:
        return self.finals[request.request_id]

    def prefill(self, prompt: Sequence[int], *, offer: KVTransferParams | None = None, **options) -> KVTransferParams:
        """A whole prefill leg; the params of its answer."""
        params = KVTransferParams.for_prefill(offer)
        request = self.submit(prompt, max_tokens=options.pop("max_tokens", 1), params=params, **options)
        self.run()
        return self.said(request).for_decode()

    def decode(self, prompt: Sequence[int], params: KVTransferParams, **options) -> tuple[list[int], KVTransferParams]:
        """A whole decode leg; its tokens, and the params of its answer."""
        request = self.submit(prompt, params=params, **options)
        self.run()
        return self.answer(request), self.said(request)

    def said(self, request: Request) -> KVTransferParams:
        """The params of an answer, as they arrive at the router."""
        params = self.final(request).kv_transfer_params
        assert params is not None, f"{request.request_id} offers nothing"
        return KVTransferParams.parse(params.to_json())

    # Invariants

    def tables(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every list of blocks that someone relies on."""
        scheduler = self.scheduler
        holders = [*scheduler.running, *scheduler.waiting, *scheduler.loaded, *scheduler.loading.values()]
        tables = [(request.request_id, tuple(request.block_ids)) for request in holders]
        tables += [(f"lease {key}", lease.block_ids) for key, lease in self.leases._leases.items()]
        if isinstance(self.connector, KVConnector):
            tables += [(f"stalled {key}", block_ids) for key, block_ids in self.connector.reader.stalled.items()]
        return tables

    def check(self) -> None:
        pool, uses = self.pool, [0] * self.pool.num_blocks
        for name, table in self.tables():
            assert len(set(table)) == len(table), f"{name} has a block twice"
            for block_id in table:
                uses[block_id] += 1
        for block, count in zip(pool.blocks, uses, strict=True):
            assert block.ref_count == count, f"block {block.block_id}: {block.ref_count} counted, {count} used"
            assert (block.block_id in pool.free_ids) == (count == 0)
            assert count <= 1 or block.block_hash is not None, f"block {block.block_id} is shared without a name"
        assert pool.num_free + pool.num_used == pool.num_blocks
        self._check_idle_references()
        self._check_names()
        self._check_queues()

    def _check_idle_references(self) -> None:
        """The pool knows of every revocable lease, but for claims it has not been told of."""
        pool, idle = self.pool, [0] * self.pool.num_blocks
        for lease in self.leases._leases.values():
            assert lease.counted_idle or not lease.revocable or lease.claim_id is not None
            for block_id in lease.block_ids if lease.counted_idle else ():
                idle[block_id] += 1
        for block, count in zip(pool.blocks, idle, strict=True):
            assert block.idle_count == count, f"block {block.block_id}: {block.idle_count} idle counted, {count} are"
        assert pool.num_idle == sum(block.ref_count == block.idle_count > 0 for block in pool.blocks)
        pinned = [lease for lease in self.leases._leases.values() if not lease.revocable or lease.claim_id is not None]
        assert self.leases.num_pinned_blocks == sum(len(lease.block_ids) for lease in pinned)
        assert self.leases.num_claimed == sum(lease.claim_id is not None for lease in self.leases._leases.values())

    def _check_names(self) -> None:
        scheduler, size = self.scheduler, self.kv.block_size
        for request in (*scheduler.requests.values(), *scheduler.loading.values()):
            if request.block_hashes and request.block_hashes[-1] not in self.filled:
                values = kv_of(request.token_ids)
                for index, name in enumerate(request.block_hashes):
                    self.filled[name] = tuple(values[index * size : (index + 1) * size])
        named = {block.block_id: block.block_hash for block in self.pool.blocks if block.block_hash is not None}
        assert {block_id: name for name, block_id in self.pool.cached.items()} == named
        for block_id, name in named.items():
            assert self.kv.read(block_id) == self.filled[name], f"block {block_id} does not hold what its name says"

    def _check_queues(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.max_num_seqs
        for request in scheduler.waiting:
            assert not request.block_ids, f"{request.request_id} waits and holds blocks"
        queued = [*scheduler.running, *scheduler.waiting, *scheduler.loaded, *scheduler.media.fetching.values()]
        queued += [request for request in scheduler.loading.values() if not request.status.finished]
        assert len(queued) == len(scheduler.requests)
        assert {id(request) for request in queued} == {id(request) for request in scheduler.requests.values()}

    def check_idle(self) -> None:
        """No request is left, nothing is pinned, and every block is free or only on offer."""
        assert not self.scheduler.requests
        assert not self.scheduler.loading
        assert len(self.leases) == self.leases.num_idle
        assert self.leases.num_pinned_blocks == 0
        assert self.pool.num_available == self.pool.num_blocks
        assert self.pool.usage == 0

    def check_empty(self) -> None:
        """Nothing is left: no request, no lease, every block free."""
        self.check_idle()
        assert len(self.leases) == 0
        assert self.pool.num_free == self.pool.num_blocks
        if isinstance(self.connector, KVConnector):
            assert self.connector.next_wakeup() is None
        assert self.leases.num_granted == sum(self.leases.num_ended.values())


FORGERIES = ("hashes left out", "hashes of another", "blocks of another", "reversed", "repeated", "shifted")
OF_ITS_OWN_PROMPT = frozenset({"reversed", "repeated", "shifted"})
"""Forgeries that do harm to the prompt that the blocks were computed for."""


def forge(forgery: str, params: KVTransferParams, other: KVTransferParams) -> KVTransferParams:
    """What a client may make of the params for one prompt, and those for another of the same length."""
    (blocks,) = params.remote_block_ids or [[]]
    match forgery:
        case "hashes left out":
            return params.without("remote_block_hashes")
        case "hashes of another":
            return params.with_(remote_block_hashes=other.remote_block_hashes)
        case "blocks of another":
            # Named rightly in all but the lease, so that only its owner's table tells.
            return other.with_(remote_block_ids=params.remote_block_ids)
        case "reversed":
            return params.with_(remote_block_ids=[blocks[::-1]])
        case "repeated":
            return params.with_(remote_block_ids=[blocks[:1] * len(blocks)])
        case "shifted":
            return params.with_(remote_block_ids=[[*blocks[1:], *blocks[:1]]])
    raise AssertionError(forgery)


def pair(
    *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None
) -> tuple[FakeEngine, FakeEngine, FakeNetwork]:
    """A prefill and a decode engine on one network."""
    network = FakeNetwork()
    p = FakeEngine(network=network, role="prefill", name="p", **(prefill or {}))
    d = FakeEngine(network=network, role="decode", name="d", **(decode or {}))
    return p, d, network


def settle_all(*engines: FakeEngine, seconds: float = 30.0) -> None:
    """Let messages arrive and leases end, without requests."""
    for _ in range(int(seconds)):
        for engine in engines:
            engine.step()
        engines[0].network.advance(1.0)
    for engine in engines:
        engine.step()

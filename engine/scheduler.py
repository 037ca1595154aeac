"""The scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase. Each request has `num_computed_tokens` and `num_tokens`, and a step hands
out a token budget so that the first catches up with the second: running requests first, then waiting ones in order of
arrival, or of their priority. Chunked prefill, prefix caching and mixed batches all follow from this one rule.

Blocks are held by requests that run, load (their KV is under way from another engine) or have loaded; nothing else in
the queue holds any. Which blocks they are is the affair of `engine/block_tables.py`.
"""

from __future__ import annotations

import time
from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal

from connectors.base import (
    BlocksClaimed,
    BlocksReleased,
    Connector,
    ConnectorOutcome,
    Hold,
    Loaded,
    LoadFailed,
)
from connectors.transport import TransferEvent
from connectors.wire.transfer import WireError
from engine import limits
from engine.batch import Batch, ScheduledRequest, StepResult
from engine.block_tables import BlockTables, num_blocks_owed
from engine.blocks import BlockPool
from engine.logprobs import TokenLogprobs
from engine.media.cache import EncoderCacheManager
from engine.media.schedule import Availability, EncodingUnavailable, MediaSchedule
from engine.messages import Output, Stop
from engine.request import Request, RequestStatus


class Scheduler:
    """Owns the requests and the block pool. Main thread only; the counters may be read from any."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        pool: BlockPool,
        connector: Connector,
        media: MediaSchedule | None = None,
        enable_prefix_caching: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.pool = pool
        self.connector = connector
        self.media = media or MediaSchedule(EncoderCacheManager(1, 1))
        self.ec_connector = self.media.connector
        self.tables = BlockTables(pool, connector, enable_prefix_caching=enable_prefix_caching)
        self._rank = _by_priority if policy == "priority" else _by_arrival
        self._clock = clock

        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        """KV under way. A request that ended meanwhile stays: its blocks may still be written to."""
        self.loaded: deque[Request] = deque()
        """KV has come, but `max_num_seqs` others run."""
        self.running: list[Request] = []
        """Oldest first, or most urgent first; the last is the first to be preempted."""
        self._outputs: list[Output] = []

        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.prompt_tokens_by_source: Counter[str] = Counter()
        """local_compute (counted again when computed again), local_cache_hit, external_kv_transfer."""
        self.num_finished: Counter[str] = Counter()
        """By finish reason."""

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.loaded) + self.num_deferred

    @property
    def num_deferred(self) -> int:
        """Those of them that wait for what other engines have."""
        return len(self.loading) + len(self.media.fetching)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that no request can have, 0 to 1; blocks pinned for other engines count."""
        return self.pool.usage

    @property
    def num_kv_fetch_by_stage(self) -> dict[str, int]:
        """Requests whose KV comes from another engine and that do not run yet, by how far they are."""
        return {
            "waiting_to_start": sum(_wants_load(request) for request in tuple(self.waiting)),
            "in_progress": sum(not request.status.finished for request in tuple(self.loading.values())),
            "completed_waiting": len(self.loaded),
        }

    # What comes from outside, between two steps or while one runs.

    def add(self, request: Request) -> None:
        """Queue a request, or end it at once with an error if it can never be served."""
        assert request.request_id not in self.requests, f"{request.request_id}: added twice"
        self.requests[request.request_id] = request
        try:
            self.connector.on_new_request(request)
        except WireError as error:
            self._fail(request, str(error), status=400)
            return
        self.media.connector.on_new_request(request)
        obstacle = limits.obstacle(request, self.max_model_len, self.pool.num_blocks)
        if obstacle := obstacle or self.media.obstacle(request):
            self._fail(request, obstacle, status=400)
            return
        # Said at once, rather than after it has queued.
        relies_on_cache = limits.max_prefill(request) is not None
        if relies_on_cache and (miss := limits.cache_miss(request, len(self.tables.match(request)))):
            self._fail(request, miss, status=409)
            return
        if request.media:  # to be fetched while it waits, as far as is known by now
            num_local = len(self.tables.match(request)) * request.block_size
            num_have = num_local + self.tables.num_loadable(request, num_local)[0]
            if self._encodings(request, num_have, is_next=False) in (Availability.UNDER_WAY, Availability.NEVER):
                return
        insort_right(self.waiting, request, key=self._rank)

    def stop(self, message: Stop) -> None:
        """End a request early; one that has ended already is not touched."""
        request = self.requests.get(message.request_id)
        if request is None:
            return
        if message.aborted or request.status not in (RequestStatus.RUNNING, RequestStatus.PREEMPTED):
            self._finish(request, RequestStatus.FINISHED_ABORTED)
            return
        if message.num_output_tokens is not None:
            # The tokens past the stop string are no part of the answer: nobody may build on their KV.
            kept = request.num_prompt_tokens + message.num_output_tokens
            request.num_computed_tokens = min(request.num_computed_tokens, kept)
        self._finish(request, RequestStatus.FINISHED_STOPPED)

    def settle(self, event: TransferEvent) -> None:
        """Something happened at the transport."""
        self._apply(self.connector.settle(event))

    def update_leases(self, now: float) -> None:
        """Note which blocks held for other engines were claimed, and free those held until `now` (monotonic
        seconds)."""
        self._apply(self.connector.lease_changes(now))
        self.media.update_leases(now)

    def fail(self, requests: Sequence[Request], message: str) -> None:
        """End requests with an error, for instance because the step that computed them failed."""
        for request in requests:
            if not request.status.finished:
                self._fail(request, message)

    def abort_all(self) -> None:
        for request in list(self.requests.values()):
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    def take_outputs(self) -> list[Output]:
        """What came out since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # One step.

    def schedule(self) -> Batch | None:
        """The next step's work, or None if nothing can be computed until something comes in from outside."""
        scheduled: list[ScheduledRequest] = []
        self.media.begin_step()
        for request in reversed(self.media.take_arrived()):
            insort_left(self.waiting, request, key=self._rank)
        budget = self._schedule_running(scheduled)
        self._admit(scheduled, budget)
        self.connector.build_connector_meta()
        self.media.connector.build_connector_meta()
        return self.media.batch(scheduled) if scheduled else None

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        """The batch was computed, with this result."""
        tokens = iter(result.token_ids)
        self.media.encoded()
        for item in batch.scheduled:
            request = item.request
            token = next(tokens) if item.samples else None
            if request.status.finished:
                continue  # ended while the step ran
            request.num_computed_tokens = item.num_computed + item.num_tokens
            prompt_part = min(request.num_computed_tokens, request.num_prompt_tokens) - item.num_computed
            self.prompt_tokens_by_source["local_compute"] += max(0, prompt_part)
            self.tables.name(request, item.num_computed)
            self.media.computed(request)
            if request.wants_prompt_logprobs:
                request.add_prompt_logprobs(item.num_computed, result.prompt_logprobs.get(request.request_id, ()))
            if failure := result.failures.get(request.request_id):
                self._fail(request, failure, status=400)
            elif token is not None:
                self._append(request, token, result.logprobs.get(request.request_id))
        assert next(tokens, None) is None, "more tokens sampled than asked for"

    def _schedule_running(self, scheduled: list[ScheduledRequest]) -> int:
        """Give running requests their tokens, oldest first; returns what is left of the budget."""
        while self.loaded and len(self.running) < self.max_num_seqs:
            request = self.loaded.popleft()
            request.to(RequestStatus.RUNNING)
            insort_right(self.running, request, key=self._rank)
        budget, index = self.max_num_batched_tokens, 0
        while index < len(self.running) and budget:
            request = self.running[index]
            # One token is kept for each younger request, so that a long prefill does not stall their decoding.
            most = max(1, budget - (len(self.running) - index - 1))
            num_new = min(request.num_tokens - request.num_computed_tokens, most)
            num_new = self.media.chunk(request, request.num_computed_tokens, num_new)
            if not num_new:  # others' pictures are encoded first
                index += 1
            elif self._make_room(request, num_new):
                self._give(request, num_new, scheduled)
                budget -= num_new
                index += 1
        return budget

    def _make_room(self, request: Request, num_new: int) -> bool:
        """Allocate blocks for more tokens of a running request, at the cost of idle leases, then of younger requests.

        False if the request itself had to go, being the youngest or too long for the whole pool.
        """
        total = limits.num_blocks(request, request.num_computed_tokens + num_new)
        if total > self.pool.num_blocks:
            self._fail(request, limits.too_long(self.pool.num_blocks, request.num_computed_tokens + num_new))
            return False
        missing = max(0, total - len(request.block_ids))
        while not self.tables.reclaim(missing):
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                return False
        if missing:
            request.block_ids += self.pool.allocate(missing)
        return True

    def _victim(self) -> Request:
        """Who goes first if the room does not do for all: the least urgent, rather one that has only been loaded."""
        last = self.running[-1]
        if self.loaded and self._rank(self.loaded[-1]) >= self._rank(last):
            return self.loaded.pop()
        return self.running.pop()

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks away; it computes everything again later, before its like in the queue."""
        self.tables.free(request)
        self.media.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        if request.status is RequestStatus.RUNNING:
            request.to(RequestStatus.PREEMPTED)
        insort_left(self.waiting, request, key=self._rank)

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Admit waiting requests in the order of the queue; the first that has to wait stops those behind it.

        A request is admitted only if *all* its tokens find room beside what the admitted ones still need for
        theirs: neither a prompt nor a load may take the blocks that a prefill under way is owed.
        """
        owed = sum(num_blocks_owed(request) for request in (*self.running, *self.loading.values(), *self.loaded))
        while self.waiting:
            request = self.waiting[0]
            if limits.num_blocks(request, request.num_tokens) > self.pool.num_blocks:
                self._fail(request, limits.too_long(self.pool.num_blocks, request.num_tokens))
                continue
            hits = self.tables.match(request)
            if miss := limits.cache_miss(request, len(hits)):
                self._fail(request, miss, status=409)
                continue
            num_local = len(hits) * request.block_size
            num_external, is_async = self.tables.num_loadable(request, num_local)
            assert is_async or not num_external, "a load that does not wait is not supported"
            there = self._encodings(request, num_local + num_external, is_next=True)
            if there in (Availability.UNDER_WAY, Availability.NEVER):
                continue
            if num_external:
                admissible = len(self.loading) + len(self.loaded) < self.max_num_seqs
            else:
                admissible = budget > 0 and len(self.running) < self.max_num_seqs
            num_new_blocks = limits.num_blocks(request, request.num_tokens) - len(hits)
            if there is Availability.NO_ROOM or not admissible:
                return
            if num_new_blocks + owed > self.pool.num_available - self.pool.num_revived(hits):
                return
            num_new = 0 if num_external else min(request.num_tokens - num_local, budget)
            num_new = self.media.chunk(request, num_local, num_new)
            if not (num_new or num_external) or not self.tables.lay_out(request, hits, num_external, num_new):
                return
            self.media.admitted(request)
            self.waiting.popleft()
            if num_external:
                request.to(RequestStatus.WAITING_FOR_REMOTE_KVS)
                self.loading[request.request_id] = request
            else:
                request.to(RequestStatus.RUNNING)
                insort_right(self.running, request, key=self._rank)
                self._give(request, num_new, scheduled)
                budget -= num_new
            owed += num_blocks_owed(request)

    def _give(self, request: Request, num_new: int, scheduled: list[ScheduledRequest]) -> None:
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
            self.prompt_tokens_by_source["local_cache_hit"] += request.num_cached_tokens
        self.media.give(request, request.num_computed_tokens, num_new)
        scheduled.append(ScheduledRequest(request, request.num_computed_tokens, num_new))

    def _encodings(self, request: Request, num_have: int, *, is_next: bool) -> Availability:
        """How it stands with what the pictures of a waiting request are encoded to. It has left the queue if that is
        under way, and ended if it can be had in no way."""
        try:
            there = self.media.ensure_cache_available(request, num_have, is_next=is_next)
        except EncodingUnavailable as error:
            self._fail(request, str(error), status=error.status)
            return Availability.NEVER
        if there is Availability.UNDER_WAY and is_next:
            self.waiting.popleft()
        return there

    # How a load ends.

    def _apply(self, outcomes: Sequence[ConnectorOutcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, BlocksReleased):
                self.tables.release(outcome)
                continue
            if isinstance(outcome, BlocksClaimed):
                self.pool.pin(outcome.block_ids)
                continue
            request = self.loading.pop(outcome.request_id)
            if isinstance(outcome, LoadFailed) and outcome.kept_block_ids:
                request.block_ids = request.block_ids[: -len(outcome.kept_block_ids)]
            if request.status.finished:
                self.tables.free(request)
            elif isinstance(outcome, Loaded):
                self._loaded(request)
            else:
                self._load_failed(request, outcome)

    def _loaded(self, request: Request) -> None:
        """The KV is there. If it is that of the whole prompt, its last token is computed again for the logits, and
        the block it lies in is named after that, like any block that a step writes to."""
        request.num_external_tokens = request.num_computed_tokens - request.num_cached_tokens
        self.prompt_tokens_by_source["external_kv_transfer"] += request.num_external_tokens
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self.tables.name(request, request.num_cached_tokens)
        request.to(RequestStatus.WAITING)
        insort_right(self.loaded, request, key=self._rank)

    def _load_failed(self, request: Request, outcome: LoadFailed) -> None:
        """Back to what this engine has itself; the blocks meant for the load hold nothing that may be used."""
        self.tables.free(request)
        self.media.free(request)
        request.num_computed_tokens = request.num_cached_tokens = 0
        if outcome.recompute:
            request.to(RequestStatus.WAITING)
            insort_left(self.waiting, request, key=self._rank)
        else:
            self._fail(request, outcome.message)

    # How a request ends.

    def _append(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        request.append(token_id)
        self.num_generated_tokens += 1
        status, stop_token_id = limits.stop_reason(request, token_id, self.max_model_len)
        if status is not None:
            self._finish(request, status, token_ids=[token_id], stop_token_id=stop_token_id, logprobs=logprobs)
            return
        if request.matcher is not None:
            request.matcher.advance(token_id)
            if request.matcher.failure is not None:
                self._fail(request, request.matcher.failure, status=400)
                return
        self._outputs.append(
            Output(
                request_id=request.request_id,
                token_ids=[token_id],
                logprobs=() if logprobs is None else [logprobs],
                prompt_logprobs=_first_prompt_logprobs(request),
                num_cached_tokens=request.num_cached_tokens,
                num_external_tokens=request.num_external_tokens,
            )
        )

    def _fail(self, request: Request, message: str, *, status: int = 500) -> None:
        self._finish(request, RequestStatus.FINISHED_ERROR, error=message, error_status=status)

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        *,
        token_ids: Sequence[int] = (),
        stop_token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
        error: str | None = None,
        error_status: int = 500,
    ) -> None:
        """End a request: its blocks are freed, held for another engine, or kept until the transfer into them ends."""
        request.to(status)
        del self.requests[request.request_id]
        for queue in (self.running, self.waiting, self.loaded):
            if request in queue:
                queue.remove(request)
        hold, params = self.connector.request_finished(request)
        ec_params = self.ec_connector.request_finished(request)
        self.media.free(request)
        if hold is Hold.REVOCABLE:
            self.pool.idle(request.block_ids)
        elif hold is Hold.NOTHING and request.request_id not in self.loading:
            self.tables.free(request)
        self.num_finished[status.value] += 1
        self._outputs.append(
            Output(
                request_id=request.request_id,
                token_ids=list(token_ids),
                finish_reason=status.value,
                stop_token_id=stop_token_id,
                kv_transfer_params=params,
                ec_transfer_params=ec_params,
                logprobs=() if logprobs is None else [logprobs],
                prompt_logprobs=_first_prompt_logprobs(request) if token_ids else None,
                num_cached_tokens=request.num_cached_tokens,
                num_external_tokens=request.num_external_tokens,
                error=error,
                error_status=error_status,
            )
        )


def _by_arrival(request: Request) -> tuple[int, float]:
    """The same for all: each queue stays in the order in which requests came to it."""
    return 0, 0.0


def _by_priority(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_time


def _first_prompt_logprobs(request: Request) -> Sequence[TokenLogprobs | None] | None:
    """They go out with the first token."""
    if request.sampling.prompt_logprobs is None or request.num_output_tokens != 1:
        return None
    return request.prompt_logprobs


def _wants_load(request: Request) -> bool:
    params = request.kv_transfer_params
    if params is None or request.num_preemptions or request.wants_prompt_logprobs:
        return False
    return bool(params.do_remote_prefill or (params.do_remote_decode and any(params.remote_block_ids or ())))

"""The numbers the scheduler, the connector and the tokenizer keep, as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from connectors.kv import KVConnector
from engine.metrics import Reading
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer

FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
NOT_PULLED = ("layout", "hashes", "length", "self", "cached", "abandoned")


def engine_readings(scheduler: Scheduler, tokenizer: Tokenizer, kv: KVConnector | None) -> Iterator[Reading]:
    yield Reading("gauge", "vllm:num_requests_running", "Requests being computed.", lambda: scheduler.num_running)
    yield Reading("gauge", "vllm:num_requests_waiting", "Requests waiting.", lambda: scheduler.num_waiting)
    reason = "vllm:num_requests_waiting_by_reason", "Requests waiting, for room or for KV from elsewhere."
    yield Reading("gauge", *reason, lambda: scheduler.num_waiting - len(scheduler.loading), ("reason", "capacity"))
    yield Reading("gauge", *reason, lambda: len(scheduler.loading), ("reason", "deferred"))
    yield Reading("gauge", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda: scheduler.kv_usage)
    yield Reading("counter", "vllm:num_preemptions", "Preempted requests.", lambda: scheduler.num_preemptions)
    yield Reading("counter", "backhaul_engine_tokenizer_calls", "Texts tokenized.", lambda: tokenizer.calls)
    pinned = "backhaul_engine_blocks_pinned", "KV blocks held for other engines."
    held = "backhaul_engine_leases_held", "Finished requests whose blocks are held for other engines."
    if kv is None:
        yield Reading("gauge", *pinned, lambda: 0)
        yield Reading("gauge", *held, lambda: 0)
    else:
        yield Reading("gauge", *pinned, lambda: kv.leases.num_blocks)
        yield Reading("gauge", *held, lambda: len(kv.leases))
        yield from _transfer_readings(scheduler, kv)


def _transfer_readings(scheduler: Scheduler, kv: KVConnector) -> Iterator[Reading]:
    for stage in FETCH_STAGES:
        yield Reading(
            "gauge",
            "vllm:num_requests_kv_fetch_by_stage",
            "Requests whose KV comes from another engine, by how far they are.",
            lambda stage=stage: scheduler.num_kv_fetch_by_stage[stage],  # type: ignore[misc]
            ("stage", stage),
        )
    for name, help, read in (
        ("vllm:nixl_num_kv_expired_reqs", "Leases that ran out unread.", lambda: kv.num_leases_expired),
        (
            "vllm:nixl_num_notifications_after_expiry",
            "Readers that were done after their lease had run out.",
            lambda: kv.num_released_after_expiry,
        ),
        (
            "backhaul_engine_unknown_notifications",
            "Releases of blocks that were not held.",
            lambda: kv.num_released_unknown,
        ),
    ):
        yield Reading("counter", name, help, read)
    for reason in NOT_PULLED:
        yield Reading(
            "counter",
            "backhaul_engine_kv_not_pulled",
            "Offered blocks released unread, by reason.",
            lambda reason=reason: kv.num_not_pulled[reason],  # type: ignore[misc]
            ("reason", reason),
        )

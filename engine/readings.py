"""The numbers the scheduler, the connector and the tokenizer keep, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar, get_args

from connectors.kv import KVConnector
from connectors.lease import Fate
from connectors.reader import Source
from engine.metrics import HANDSHAKE_REASONS, Reading
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer

FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
NOT_PULLED = ("layout", "hashes", "length", "self", "cached", "below_threshold", "abandoned", "disabled")
REFUSALS = ("expired", "claimed", "cancelled", "released", "revoked")
FATES: tuple[Fate, ...] = get_args(Fate)
SOURCES: tuple[Source, ...] = get_args(Source)

K = TypeVar("K", bound=str)


def engine_readings(scheduler: Scheduler, tokenizer: Tokenizer, kv: KVConnector | None) -> Iterator[Reading]:
    yield Reading("gauge", "vllm:num_requests_running", "Requests being computed.", lambda: scheduler.num_running)
    yield Reading("gauge", "vllm:num_requests_waiting", "Requests waiting.", lambda: scheduler.num_waiting)
    reason = "vllm:num_requests_waiting_by_reason", "Requests waiting, for room or for what others have."
    yield Reading("gauge", *reason, lambda: scheduler.num_waiting - scheduler.num_deferred, (("reason", "capacity"),))
    yield Reading("gauge", *reason, lambda: scheduler.num_deferred, (("reason", "deferred"),))
    yield Reading("gauge", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda: scheduler.kv_usage)
    yield Reading("counter", "vllm:num_preemptions", "Preempted requests.", lambda: scheduler.num_preemptions)
    yield Reading("counter", "backhaul_engine_tokenizer_calls", "Texts tokenized.", lambda: tokenizer.calls)
    pinned = "backhaul_engine_blocks_pinned", "KV blocks held for other engines that no request here can have."
    idle = "backhaul_engine_blocks_idle", "KV blocks kept for a next turn, unless a request here needs the room."
    held = "backhaul_engine_leases_held", "Finished requests whose blocks are held for other engines."
    yield Reading("gauge", *idle, lambda: scheduler.pool.num_idle)
    yield from readings_by(
        "backhaul_engine_handshake_failures",
        "Refused or failed handshakes with other engines, by reason.",
        "reason",
        HANDSHAKE_REASONS,
        Counter() if kv is None else kv.transport.num_handshakes_failed,
    )
    if kv is None:
        yield Reading("gauge", *pinned, lambda: 0)
        yield Reading("gauge", *held, lambda: 0)
    else:
        yield Reading("gauge", *pinned, lambda: kv.leases.num_pinned_blocks)
        yield Reading("gauge", *held, lambda: len(kv.leases))
        yield from _lease_readings(kv)
        yield from _pull_readings(scheduler, kv)


def _lease_readings(kv: KVConnector) -> Iterator[Reading]:
    leases, owner = kv.leases, kv.owner
    claimed = "backhaul_engine_leases_claimed", "Leases whose reader is at work."
    yield Reading("gauge", *claimed, lambda: leases.num_claimed)
    for name, help, read in (
        ("backhaul_engine_leases_granted", "Finished requests that left their blocks.", lambda: leases.num_granted),
        ("backhaul_engine_claims_granted", "Readers that were given leave to read.", lambda: leases.num_claims),
        ("vllm:nixl_num_kv_expired_reqs", "Leases that ran out.", lambda: leases.num_ended["expired"]),
        (
            "vllm:nixl_num_notifications_after_expiry",
            "Readers that were done after their lease had run out.",
            lambda: owner.num_released_after_expiry,
        ),
        (
            "backhaul_engine_unknown_notifications",
            "Releases of blocks that were not held.",
            lambda: owner.num_released_unknown,
        ),
    ):
        yield Reading("counter", name, help, read)
    yield from readings_by(
        "backhaul_engine_leases_ended", "Leases that are over, by what ended them.", "by", FATES, leases.num_ended
    )
    yield from readings_by(
        "backhaul_engine_claims_refused",
        "Readers that were refused, by what had become of the lease.",
        "reason",
        REFUSALS,
        leases.num_claims_refused,
    )


def _pull_readings(scheduler: Scheduler, kv: KVConnector) -> Iterator[Reading]:
    reader = kv.reader
    stalled = (
        "backhaul_engine_blocks_stalled",
        "KV blocks that a peer which hangs may still write to, out of use till then.",
    )
    yield Reading("gauge", *stalled, lambda: reader.num_stalled_blocks)
    for stage in FETCH_STAGES:
        yield Reading(
            "gauge",
            "vllm:num_requests_kv_fetch_by_stage",
            "Requests whose KV comes from another engine, by how far they are.",
            lambda stage=stage: scheduler.num_kv_fetch_by_stage[stage],  # type: ignore[misc]
            (("stage", stage),),
        )
    yield from readings_by(
        "backhaul_engine_kv_not_pulled",
        "Blocks on offer that were released unread, by reason.",
        "reason",
        NOT_PULLED,
        reader.num_not_pulled,
    )
    yield from readings_by(
        "backhaul_engine_kv_tokens_pulled",
        "Prompt tokens whose KV was pulled, by who had computed it.",
        "source",
        SOURCES,
        reader.num_tokens_pulled,
    )
    for source in SOURCES:
        for reason in (*NOT_PULLED, "failed"):
            yield Reading(
                "counter",
                "backhaul_engine_kv_tokens_not_pulled",
                "Prompt tokens whose KV was on offer and was not pulled, by who had computed it and why.",
                lambda key=(source, reason): reader.num_tokens_not_pulled[key],  # type: ignore[misc]
                (("source", source), ("reason", reason)),
            )
    dropped = "backhaul_engine_messages_dropped", "Releases and heartbeats not sent: too many other peers are busy."
    yield Reading("counter", *dropped, lambda: kv.transport.num_messages_dropped)


def readings_by(name: str, help: str, label: str, values: Iterable[K], counter: Counter[K]) -> Iterator[Reading]:
    for value in values:
        yield Reading("counter", name, help, lambda value=value: counter[value], ((label, value),))  # type: ignore[misc]

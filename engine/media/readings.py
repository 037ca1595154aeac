"""The numbers the encoder cache and its connector keep, as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from connectors.ec import EncoderConnector
from connectors.lease import Fate
from engine.media.encode_only import EncodeScheduler
from engine.media.schedule import MediaSchedule
from engine.metrics import HANDSHAKE_REASONS, PULL_FAILURES, Reading
from engine.readings import REFUSALS, readings_by
from engine.tokenizer import Tokenizer

PULLS_FAILED = (*PULL_FAILURES, "overdue")
NOT_TRIED = ("disabled", "incomplete", "layout", "shape", "self", "lost")
FALLBACKS = (*NOT_TRIED, *(each for each in PULLS_FAILED if each != "layout"))
"""Why an announced encoding was not had: this engine fetches none, the announcement is of no use, the encoding was read
once and evicted since, or the pull failed."""
FATES: tuple[Fate, ...] = get_args(Fate)


def media_readings(media: MediaSchedule, ec: EncoderConnector | None) -> Iterator[Reading]:
    cache, pool = media.cache, media.cache.pool
    for name, help, read in (
        ("backhaul_engine_encodes", "Pictures encoded here.", lambda: media.num_encoded),
        ("backhaul_engine_encoder_cache_queries", "Encodings that requests needed.", lambda: cache.num_queries),
        ("backhaul_engine_encoder_cache_hits", "Those of them that were there already.", lambda: cache.num_hits),
        ("backhaul_engine_encoder_cache_evicted_blocks", "Blocks evicted for others.", lambda: pool.num_evictions),
    ):
        yield Reading("counter", name, help, read)
    usage = "backhaul_engine_encoder_cache_usage", "Share of the encoder cache that cannot be evicted, 0 to 1."
    yield Reading("gauge", *usage, lambda: pool.usage)
    fetching = "backhaul_engine_requests_fetching_encodings", "Requests that wait for encodings from other engines."
    yield Reading("gauge", *fetching, lambda: len(media.fetching))
    yield from readings_by(
        "backhaul_engine_encoding_fallbacks",
        "Pictures encoded here though another engine had announced them, by reason.",
        "reason",
        FALLBACKS,
        media.num_fallbacks,
    )
    yield from readings_by(
        "backhaul_engine_encodings_unavailable",
        "Pictures that could neither be loaded nor be encoded here, and failed their request, by reason.",
        "reason",
        FALLBACKS,
        media.num_unavailable,
    )
    if ec is not None:
        yield from _pulls(ec)
        yield from _leases(ec)


def encode_only_readings(scheduler: EncodeScheduler, tokenizer: Tokenizer) -> Iterator[Reading]:
    """Of an engine that does nothing else, under the names that it shares with the others."""
    yield Reading("gauge", "vllm:num_requests_running", "Requests being computed.", lambda: scheduler.num_running)
    yield Reading("gauge", "vllm:num_requests_waiting", "Requests waiting.", lambda: scheduler.num_waiting)
    yield Reading("counter", "backhaul_engine_tokenizer_calls", "Texts tokenized.", lambda: tokenizer.calls)


def _pulls(ec: EncoderConnector) -> Iterator[Reading]:
    for name, help, read in (
        ("backhaul_engine_encodings_pulled", "Encodings read from other engines.", lambda: ec.num_pulls_done),
        ("backhaul_engine_encoding_bytes_pulled", "Bytes of them.", lambda: ec.num_bytes_pulled),
        ("backhaul_engine_encoding_pull_seconds", "Time that took, added up.", lambda: ec.seconds_pulling),
        ("backhaul_engine_encodings_not_pulled", "Announcements given back unread.", lambda: ec.num_not_pulled),
    ):
        yield Reading("counter", name, help, read)
    yield from readings_by(
        "backhaul_engine_encoding_pulls_failed",
        "Encodings that could not be read from another engine, by reason.",
        "reason",
        PULLS_FAILED,
        ec.num_pulls_failed,
    )
    yield from readings_by(
        "backhaul_engine_encoding_handshake_failures",
        "Refused or failed handshakes with other engines, by reason.",
        "reason",
        HANDSHAKE_REASONS,
        ec.transport.num_handshakes_failed,
    )


def _leases(ec: EncoderConnector) -> Iterator[Reading]:
    leases = ec.leases
    for name, help, gauge in (
        ("backhaul_engine_encoding_leases_held", "Encodings announced and not read yet.", lambda: len(leases)),
        ("backhaul_engine_encoding_blocks_pinned", "Blocks that others are reading.", lambda: leases.num_pinned_blocks),
        (
            "backhaul_engine_encoding_blocks_stalled",
            "Blocks that a peer which hangs may still write to.",
            lambda: sum(map(len, tuple(ec.stalled.values()))),
        ),
    ):
        yield Reading("gauge", name, help, gauge)
    announced = "backhaul_engine_encodings_announced", "Encodings announced to others."
    yield Reading("counter", *announced, lambda: leases.num_granted)
    yield from readings_by(
        "backhaul_engine_encoding_leases_ended",
        "Announcements that are over, by what ended them.",
        "by",
        FATES,
        leases.num_ended,
    )
    yield from readings_by(
        "backhaul_engine_encoding_claims_refused",
        "Readers that were refused, by what had become of the announcement.",
        "reason",
        REFUSALS,
        leases.num_claims_refused,
    )

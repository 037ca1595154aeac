"""What the router counts. No label takes a value a client can choose: the number of series is bounded by the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest

from router.admission import Gate
from router.engine_gauges import EngineGauges
from router.faults import FaultKind
from router.phases import Phase
from router.pool import Pool
from router.tally import Counts, Durations, Models
from router.totals import snapshot

OUTCOMES: Final = ("ok", "rejected", "failed", "cut", "client_gone")
STORE_OPERATIONS: Final = ("claim", "save", "put_back", "take_offer")
TOKEN_KINDS: Final = ("prompt", "cached", "pulled", "computed", "completion")
SPLICED: Final = "spliced"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
RESTARTS: Final = (
    "backhaul_router_process_restarts",
    "Processes started in place of ones that ended by themselves, where the port is served by several.",
)
QUICK_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
PIECE_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    def __init__(self, endpoints: Sequence[str]) -> None:
        self.registry = registry = CollectorRegistry()
        self.model = Models().label
        """As a label; of a model that engines list."""
        ProcessCollector(registry=registry)
        name = "backhaul_router_{}".format
        counts = partial(Counts, registry=registry)
        durations = partial(Durations, buckets=SECONDS, registry=registry)
        Gauge(name("processes"), "Processes that serve the port together.", registry=registry).set(1)
        Counts(*RESTARTS, [], registry=registry).add(by=0)
        self.turns = counts(
            name("turns"),
            "Turns by how they ended: ok; rejected (by us or an engine, 4xx); failed (before the first byte, 5xx); "
            "cut (after it); client_gone.",
            ["endpoint", "outcome"],
        )
        self.turns_in_flight = Gauge(name("turns_in_flight"), "Turns being served.", registry=registry)
        self.turn_seconds = durations(name("turn_seconds"), "Whole turns.", "endpoint")
        self.phase_seconds = durations(
            name("turn_phase_seconds"),
            "What turns spend their time on: read (the request), queue, recall (from Redis), tokenize, encode, "
            "prefill, decode (the whole answer), remember.",
            "phase",
        )
        self.leg_seconds = durations(
            name("leg_seconds"),
            "One request to an engine: a prefill leg until its answer, a decode leg until its end.",
            "leg",
        )
        self.first_byte_seconds = durations(
            name("time_to_first_token_seconds"),
            "From the request to the first piece of a streamed answer, prefill included, by model: one that engines "
            "list; beyond a hundred, other.",
            "model",
        )
        self.piece_seconds = Durations(
            name("inter_token_seconds"),
            "Between two pieces of a streamed answer, as they come from the engine; a piece is mostly one token, and "
            "more where a router or an engine is behind.",
            "model",
            buckets=PIECE_SECONDS,
            registry=registry,
        )
        self.plans = counts(
            name("plans"),
            "Turns sent to decode engines, by why these engines, and by what the last turn's KV was used for.",
            ["reason", "kv"],
        )
        self.lowered = counts(
            name("lowered"),
            "Turns that did without something because an engine cannot do it: what (handoff: the decode engine "
            "prefilled alone; pull: the last turn's KV was not given to prefill; remember; compare), and why.",
            ["what", "why"],
        )
        self.tokenizations = counts(
            name("tokenizations"),
            "Prompts whose ids were asked for, to be compared with the last turn's, by result.",
            ["result"],
        )
        self.break_even_tokens = Gauge(
            name("break_even_tokens"),
            "New prompt tokens up to which a decode engine that has the rest is left to compute them itself.",
            registry=registry,
        )
        self.leg_failures = counts(
            name("leg_failures"),
            "Requests to engines that failed before anything reached the client.",
            ["leg", "kind"],
        )
        self.outage_waits = counts(
            name("outage_waits"),
            "Turns that waited for an engine of a pool to come back: none was in rotation.",
            ["pool"],
        )
        self.media = counts(
            name("media"),
            "Pictures, recordings and films of turns, where there are encoders: encoded (by one), local (left to the "
            "engine that prefills), known (that engine has their KV).",
            ["result"],
        )
        self.encode_legs = counts(
            name("encode_legs"),
            "Requests to encoders by how they ended: ok, refused (a medium is bad), failed, cancelled.",
            ["outcome"],
        )
        self.encode_fallbacks = counts(
            name("encode_fallbacks"),
            "Times that media were left to the engine that prefills, by why: no_encoder (ready), incompatible (with "
            "that engine), failed, ambiguous (which is which), unannounced (an encoder had no room).",
            ["reason"],
        )
        self.transfer_failures = counts(
            name("kv_transfer_failures"),
            "Legs that were given blocks to pull and failed, perhaps at that, by leg and how; prefix_cache_miss: a "
            "decode engine that was left alone had lost what it had. The prompt was computed anew.",
            ["leg", "reason"],
        )
        self.retries = counts(name("retries"), "Turns tried again on other engines.", ["leg"])
        self.retries_refused = counts(
            name("retries_refused"), "Turns not tried again: too many were of late, for so few turns.", ["leg"]
        )
        self.waiting = Gauge(name("turns_waiting"), "Turns that wait for room in a pool.", ["pool"], registry=registry)
        self.handoff_missing = counts(
            name("kv_handoff_missing"),
            "Prefill answers without usable transfer params: the decode engine prefilled again.",
            ["endpoint"],
        )
        self.releases = counts(
            name("kv_releases"),
            "Blocks of a turn that nobody will read: ok (given back), refused, failed, waits_for_ttl (their engine "
            "cannot be told, and holds them until their lease ends).",
            ["result"],
        )
        self.idle_blocks = Gauge(
            name("idle_kv_blocks"),
            "KV blocks of a decode engine that offers of this process to conversations' next turns hold, estimated.",
            ["engine"],
            registry=registry,
        )
        self.capped_releases = counts(
            name("kv_capped_releases"),
            "Offers taken back from idle conversations, the oldest first, because they held too much of an engine.",
            ["engine"],
        )
        self.tokens = counts(
            name("tokens"),
            "Tokens of finished turns, as the engines report them: prompt = cached + pulled + computed; completion. "
            "spliced: of the prompt, those put in place of others that spell the same, so that KV is found by them.",
            ["kind"],
        )
        self.store_operations = counts(
            name("store_operations"),
            "Redis operations by result. claim: hit, hit_without_offer (another turn has it), miss, unreadable, "
            "hit_unreadable_offer; save: ok, oversize, older (a later turn is there), late, unreadable; put_back, "
            "take_offer: ok, gone, unreadable; any: timeout, error, refused (by Redis), skipped while it is down.",
            ["op", "result"],
        )
        self.store_seconds = Durations(
            name("store_operation_seconds"),
            "Redis operations that were answered, or given up, by kind.",
            "op",
            buckets=QUICK_SECONDS,
            registry=registry,
        )
        for endpoint in endpoints:  # there from the start, at zero: an increase from nothing is not seen by rate()
            self.handoff_missing.add(endpoint, by=0)
            self.turn_seconds.of(endpoint)
            for outcome in OUTCOMES:
                self.turns.add(endpoint, outcome, by=0)
        for leg in ("prefill", "decode"):
            self.leg_seconds.of(leg)
            self.retries.add(leg, by=0)
            self.retries_refused.add(leg, by=0)
            for kind in get_args(FaultKind):
                self.leg_failures.add(leg, kind, by=0)
            self.transfer_failures.add(leg, "status", by=0)
        for op in ("claim", "save"):
            for result in ("timeout", "error", "refused", "skipped"):
                self.store_operations.add(op, result, by=0)
        for phase in get_args(Phase):
            self.phase_seconds.of(phase)
        for op in STORE_OPERATIONS:
            self.store_seconds.of(op)
        for result in ("ok", "refused", "failed", "waits_for_ttl"):
            self.releases.add(result, by=0)
        for kind in (*TOKEN_KINDS, SPLICED):
            self.tokens.add(kind, by=0)
        for result in ("ok", "failed"):
            self.tokenizations.add(result, by=0)
        for result in ("encoded", "local", "known"):
            self.media.add(result, by=0)

    def follow(
        self,
        pool: Pool,
        turns_in_flight: Callable[[], float],
        break_even: Callable[[], float],
        *,
        prefill: Gate,
        decode: Gate,
    ) -> None:
        """Read states and loads at every scrape."""
        self.turns_in_flight.set_function(turns_in_flight)
        self.break_even_tokens.set_function(break_even)
        self.registry.register(EngineGauges(pool))
        self.waiting.labels("prefill").set_function(lambda: prefill.num_waiting)
        self.waiting.labels("decode").set_function(lambda: decode.num_waiting)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    async def tell(self, _: bytes) -> bytes:
        return self.exposition()

    async def tell_siblings(self, _: bytes) -> bytes:
        """What this process has counted, to be added to what others have."""
        return snapshot(self.registry)

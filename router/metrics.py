"""What the router counts. No label takes a value a client can choose: the number of series is bounded by the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest

from router.admission import Gate
from router.engine_gauges import EngineGauges
from router.pool import Pool
from router.tally import Counts, Durations

OUTCOMES: Final = ("ok", "rejected", "failed", "cut", "client_gone")
TOKEN_KINDS: Final = ("prompt", "cached", "pulled", "computed", "completion")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    def __init__(self, endpoints: Sequence[str]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        name = "backhaul_router_{}".format
        counts = partial(Counts, registry=registry)
        durations = partial(Durations, buckets=SECONDS, registry=registry)
        self.turns = counts(
            name("turns"),
            "Turns by how they ended: ok; rejected (by us or an engine, 4xx); failed (before the first byte, 5xx); "
            "cut (after it); client_gone.",
            ["endpoint", "outcome"],
        )
        self.turns_in_flight = Gauge(name("turns_in_flight"), "Turns being served.", registry=registry)
        self.turn_seconds = durations(name("turn_seconds"), "Whole turns.", "endpoint")
        self.leg_seconds = durations(
            name("leg_seconds"),
            "One request to an engine: a prefill leg until its answer, a decode leg until its end.",
            "leg",
        )
        self.first_byte_seconds = durations(
            name("time_to_first_token_seconds"),
            "From the request to the first piece of a streamed answer, prefill included.",
            "endpoint",
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
        self.retries = counts(name("retries"), "Turns tried again on other engines.", ["leg"])
        self.retries_refused = counts(
            name("retries_refused"), "Turns not tried again: too many were of late, for so few turns.", ["leg"]
        )
        self.waiting = Gauge(name("turns_waiting"), "Turns that wait for room in a pool.", ["pool"], registry=registry)
        self.outage_waits = counts(
            name("outage_waits"),
            "Turns that waited for an engine of a pool to come back: none was in rotation.",
            ["pool"],
        )
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
            "Tokens of finished turns, as the engines report them: prompt = cached + pulled + computed; completion.",
            ["kind"],
        )
        self.store_operations = counts(
            name("store_operations"),
            "Redis operations by result. claim: hit, hit_without_offer (another turn has it), miss, unreadable, "
            "hit_unreadable_offer; save: ok, oversize, older (a later turn is there), late, unreadable; put_back, "
            "take_offer: ok, gone, unreadable; any: timeout, error, refused (by Redis), skipped while it is down.",
            ["op", "result"],
        )
        for endpoint in endpoints:  # there from the start, at zero: an increase from nothing is not seen by rate()
            self.handoff_missing.add(endpoint, by=0)
            for outcome in OUTCOMES:
                self.turns.add(endpoint, outcome, by=0)
        for kind in TOKEN_KINDS:
            self.tokens.add(kind, by=0)
        for result in ("ok", "failed"):
            self.tokenizations.add(result, by=0)

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

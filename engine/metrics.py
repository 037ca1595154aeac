"""The worker's Prometheus metrics: vLLM's names where the meaning is vLLM's, `backhaul_engine_…` for the rest.

Label values are all from fixed sets, so the number of series does not depend on traffic. Counts that other threads
own (scheduler, leases, tokenizer) are read when scraped; a single int read needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from connectors.transport import PullDone, PullFailed, TransferEvent
from engine.messages import Output
from engine.request import Request

disable_created_metrics()  # type: ignore[no-untyped-call]

FINISHED_REASONS = ("stop", "length", "abort", "error")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
HANDSHAKE_REASONS = ("handshake", "engine_id", "layout")
PULL_FAILURES = (*HANDSHAKE_REASONS, "claim", "hashes", "disconnected", "timeout", "expired", "transfer", "other")
HANDOFF_ENDPOINTS = ("chat", "completions")

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_PER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_TRANSFER = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20)
_BYTES = tuple(float(2**power) for power in range(14, 36, 2))
_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Reading:
    """A number another part of the worker keeps, read at scrape time."""

    kind: Literal["gauge", "counter"]
    name: str
    """A counter's name is given without `_total`."""
    help: str
    read: Callable[[], float]
    labels: tuple[tuple[str, str], ...] = ()
    """More labels, with their values."""


class EngineMetrics:
    """Watches requests (an engine client's observer) and transfers, and writes the `/metrics` text."""

    def __init__(self, model_name: str, *, kv_transfer: bool = False) -> None:
        self._model_name = model_name
        self._kv_transfer = kv_transfer
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._last_token: dict[str, float] = {}
        """Per open request that has produced a token: when the latest came (monotonic)."""

        counter, counters, histogram = self._counter, self._counters, self._histogram
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._by_source = counters(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV is from.", "source", PROMPT_SOURCES
        )
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in this engine's prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self._external_queries = counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens that another engine might have held."
        )
        self._external_hits = counter("vllm:external_prefix_cache_hits", "Prompt tokens loaded from another engine.")
        self._finished = counters("vllm:request_success", "Finished requests.", "finished_reason", FINISHED_REASONS)
        self._failed = counter(
            "vllm:nixl_num_failed_transfers",
            "Pulls that failed, handshakes included; not those refused because the blocks were gone.",
        )
        self._pull_failures = counters(
            "backhaul_engine_kv_pulls_failed", "Pulls that failed, by reason.", "reason", PULL_FAILURES
        )
        self._handoff_missing = counters(
            "backhaul_engine_kv_handoff_missing",
            "Prefill answers without blocks to pull.",
            "endpoint",
            HANDOFF_ENDPOINTS,
        )
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _LATENCY)
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "Between two tokens.", _PER_TOKEN)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self._queue_time = histogram("vllm:request_queue_time_seconds", "Arrival to first scheduling.", _LATENCY)
        self._transfer_time = histogram("vllm:nixl_xfer_time_seconds", "Duration of a pull.", _TRANSFER)
        self._transfer_bytes = histogram("vllm:nixl_bytes_transferred", "Bytes of a pull.", _BYTES)

    @property
    def _values(self) -> tuple[str, str]:
        return self._model_name, "0"

    def watch(self, readings: Iterable[Reading]) -> None:
        """Read these at every scrape."""
        self.registry.register(_Readings(list(readings), self._values))

    def exposition(self) -> bytes:
        """The metrics in Prometheus text format."""
        return generate_latest(self.registry)

    def submitted(self, request: Request) -> None:
        pass

    def observed(self, request: Request, output: Output) -> None:
        now = time.monotonic()
        if output.token_ids:
            last = self._last_token.get(request.request_id)
            if last is None:
                self._first_token(request, output, now)
            else:
                self._inter_token.observe(now - last)
            self._last_token[request.request_id] = now
            self._generation_tokens.inc(len(output.token_ids))
        if output.finish_reason is not None:
            self._end(request, output.finish_reason, now)

    def aborted(self, request: Request) -> None:
        self._end(request, "abort", time.monotonic())

    def transferred(self, event: TransferEvent) -> None:
        """An event of the transport; safe from any thread."""
        if isinstance(event, PullDone):
            self._transfer_time.observe(event.seconds)
            self._transfer_bytes.observe(event.num_bytes)
        elif isinstance(event, PullFailed):
            if event.reason != "claim":  # blocks that are gone are a matter of age, not of the transfer
                self._failed.inc()
            self._pull_failures[event.reason if event.reason in PULL_FAILURES else "other"].inc()

    def handoff_missing(self, endpoint: str) -> None:
        """A request asked to hold its blocks finished without any to offer."""
        self._handoff_missing[endpoint].inc()

    def _first_token(self, request: Request, output: Output, now: float) -> None:
        self._ttft.observe(now - request.arrival_time)
        if request.first_scheduled_time is not None:
            self._queue_time.observe(max(0.0, request.first_scheduled_time - request.arrival_time))
        prompt, cached, external = request.num_prompt_tokens, output.num_cached_tokens, output.num_external_tokens
        self._prompt_tokens.inc(prompt)
        # The last prompt token is always computed here, even when its KV was loaded too.
        computed = max(1, prompt - cached - external)
        self._by_source["local_compute"].inc(computed)
        self._by_source["local_cache_hit"].inc(cached)
        self._by_source["external_kv_transfer"].inc(max(0, prompt - computed - cached))
        self._queries.inc(prompt)
        self._hits.inc(cached)
        if self._kv_transfer:
            self._external_queries.inc(prompt - cached)
            self._external_hits.inc(external)

    def _end(self, request: Request, reason: str, now: float) -> None:
        self._last_token.pop(request.request_id, None)
        self._finished[reason].inc()
        self._e2e.observe(now - request.arrival_time)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, _LABELS, registry=self.registry).labels(*self._values)

    def _counters(self, name: str, help: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """One counter per value of `label`; all of them exist, at 0, from the start."""
        family = Counter(name, help, (*_LABELS, label), registry=self.registry)
        return {value: family.labels(*self._values, value) for value in values}

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help, _LABELS, registry=self.registry, buckets=buckets).labels(*self._values)


class _Readings(Collector):
    def __init__(self, readings: Sequence[Reading], values: tuple[str, str]) -> None:
        self._readings = readings
        self._values = values

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for reading in self._readings:
            extra, values = [name for name, _ in reading.labels], [value for _, value in reading.labels]
            family = families.get(reading.name)
            if family is None:
                make = GaugeMetricFamily if reading.kind == "gauge" else CounterMetricFamily
                family = families[reading.name] = make(reading.name, reading.help, labels=[*_LABELS, *extra])
            family.add_metric([*self._values, *values], reading.read())  # type: ignore[attr-defined]
        return families.values()

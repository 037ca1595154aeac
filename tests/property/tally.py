"""What happened in a run: printed, and compared with what must have happened for the run to mean anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.integration.engines import Engine
from tests.router_harness import Front

ENGINE_COUNTERS = {
    "pulled by decode": ("decode", 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'),
    "pulled by prefill": ("prefill", 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'),
    "cached by decode": ("decode", 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'),
    "cached by prefill": ("prefill", 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'),
    "computed by decode": ("decode", 'vllm:prompt_tokens_by_source_total{source="local_compute"}'),
    "computed by prefill": ("prefill", 'vllm:prompt_tokens_by_source_total{source="local_compute"}'),
    "preemptions of prefill": ("prefill", "vllm:num_preemptions_total"),
    "preemptions of decode": ("decode", "vllm:num_preemptions_total"),
}
"""Name -> (role, sample, labels without those that all have)."""
FAMILIES = ("backhaul_engine_kv_pulls_failed", "backhaul_engine_kv_not_pulled", "backhaul_engine_leases",
            "backhaul_engine_kv_claims", "vllm:nixl_num_kv_expired_reqs", "vllm:request_success",
            "vllm:nixl_num_notifications_after_expiry", "backhaul_engine_unknown_notifications")  # fmt: skip
ROUTER_FAMILIES = ("backhaul_router_plans", "backhaul_router_turns", "backhaul_router_kv_releases",
                   "backhaul_router_store_operations", "backhaul_router_retries", "backhaul_router_verifications",
                   "backhaul_router_kv_offers", "backhaul_router_recalls", "backhaul_router_misses")  # fmt: skip


class Tally(Counter[str]):
    def require(self, at_least: Mapping[str, int], scale: float = 1.0) -> None:
        """Raise AssertionError for events that happened too seldom. Names ending in `*` are sums."""
        missing = [
            f"{name}: {found}, at least {int(least * scale)} wanted"
            for name, least in at_least.items()
            if (found := self.sum(name)) < int(least * scale)
        ]
        assert not missing, "the run did not test what it should:\n  " + "\n  ".join(missing)

    def sum(self, name: str) -> int:
        if name.endswith("*"):
            return sum(count for key, count in self.items() if key.startswith(name[:-1]))
        return self[name]

    def table(self) -> str:
        return "\n".join(f"  {name:<72}{count:>9}" for name, count in sorted(self.items()) if count)

    def add_engines(self, role: str, engines: list[Engine]) -> None:
        for engine in engines:
            samples = {_plain(name): value for name, value in engine.metrics().items() if "{" in name}
            for name, (of, sample) in ENGINE_COUNTERS.items():
                if of == role:
                    self[name] += int(samples.get(sample, 0))
            for sample, value in samples.items():
                if sample.startswith(FAMILIES) and "_bucket" not in sample:
                    self[f"{role} {sample}"] += int(value)

    async def add_routers(self, fronts: list[Front]) -> None:
        for front in fronts:
            for line in (await front.get("/metrics")).raw.decode().splitlines():
                sample, _, value = line.rpartition(" ")
                if sample.startswith(ROUTER_FAMILIES):
                    self[sample] += int(float(value))


def _plain(sample: str) -> str:
    """A sample's name with only those labels that tell it from others of the same engine."""
    name, _, rest = sample.partition("{")
    labels = [label for label in rest.rstrip("}").split(",") if not label.startswith(("engine=", "model_name="))]
    return f"{name}{{{','.join(labels)}}}" if labels else name

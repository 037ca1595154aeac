"""How busy an engine says it is, in the metrics that vLLM and our engine share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_BYTES: Final = 4 << 20
FULL_FROM: Final = 0.9
"""Of a KV cache in use: from here on, requests soon have to wait or are preempted."""
FULL_WEIGHT: Final = 8.0
"""Requests that a full cache counts as."""

_GAUGE: Final = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^\n]*\})? ([0-9.eE+-]{1,32})$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Load:
    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0
    """From 0 to 1; of several ranks, the fullest."""
    ours: int = 0
    """Requests of this router's that it had then."""

    @property
    def beside(self) -> float:
        """What it had besides: requests of others, and what a full cache is worth."""
        others = max(0.0, self.running + self.waiting - self.ours)
        return others + FULL_WEIGHT * max(0.0, self.kv_use - FULL_FROM) / (1.0 - FULL_FROM)


def read_load(text: bytes | bytearray, *, ours: int) -> Load:
    """From a scrape; what it does not say counts as nothing."""
    sums = {b"num_requests_running": 0.0, b"num_requests_waiting": 0.0, b"kv_cache_usage_perc": 0.0}
    for found in _GAUGE.finditer(text):
        name = found[1]
        try:
            value = float(found[2])
        except ValueError:
            continue
        if not 0.0 <= value < 1e9:
            continue
        sums[name] = max(sums[name], value) if name == b"kv_cache_usage_perc" else sums[name] + value
    running, waiting, kv_use = sums.values()
    return Load(running, waiting, min(kv_use, 1.0), ours)

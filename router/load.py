"""How busy an engine says it is, in the metrics that vLLM and our engine share, and what ours holds for others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_BYTES: Final = 4 << 20
FULL_FROM: Final = 0.9
"""Of a KV cache in use: from here on, requests soon have to wait or are preempted."""
FULL_WEIGHT: Final = 8.0
"""Requests that a full cache counts as."""

KV_USE: Final = b"vllm:kv_cache_usage_perc"
_NAMES: Final = (
    *(b"vllm:num_requests_running", b"vllm:num_requests_waiting", KV_USE),
    *(b"backhaul_engine_leases_held", b"backhaul_engine_blocks_pinned", b"backhaul_engine_blocks_idle"),
)
_STARTED: Final = re.compile(rb"^process_start_time_seconds ([0-9.eE+-]{1,32})$", re.MULTILINE)
_GAUGE: Final = re.compile(rb"^(" + b"|".join(_NAMES) + rb")(?:\{[^\n]*\})? ([0-9.eE+-]{1,32})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0
    """From 0 to 1; of several ranks, the fullest."""
    ours: int = 0
    """Requests of this router's that it had then."""
    is_told: bool = False
    """Whether it said anything at all."""
    leases: float = 0.0
    """Offers and hand-overs it holds blocks for; only ours tell, and the next two."""
    pinned: float = 0.0
    """Blocks a reader may be reading."""
    idle: float = 0.0
    """Blocks kept for a next turn, which whoever needs the room may take."""
    started: bytes = b""
    """When its process began, as it tells it; nothing if it does not."""
    beside: float = 0.0
    """What it had besides: requests of others, and what a full cache is worth."""


def read_load(text: bytes | bytearray, *, ours: int) -> Load:
    """From a scrape; what it does not say counts as nothing."""
    sums: dict[bytes, float] = {}
    for found in _GAUGE.finditer(text):
        name = found[1]
        try:
            value = float(found[2])
        except ValueError:
            continue
        if not 0.0 <= value < 1e9:
            continue
        last = sums.get(name, 0.0)
        sums[name] = max(last, value) if name == KV_USE else last + value
    running, waiting, kv_use, leases, pinned, idle = (sums.get(name, 0.0) for name in _NAMES)
    found_start = _STARTED.search(text)
    started = bytes(found_start[1]) if found_start else b""
    others = max(0.0, running + waiting - ours)
    full = max(0.0, min(kv_use, 1.0) - FULL_FROM) / (1.0 - FULL_FROM)
    beside = others + FULL_WEIGHT * full
    return Load(running, waiting, min(kv_use, 1.0), ours, bool(sums), leases, pinned, idle, started, beside)

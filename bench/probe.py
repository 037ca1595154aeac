"""What this machine can do at most, measured with torch: matrix products, and reading and copying memory.

    python -m bench.probe [--threads N] [--seconds 10]

A benchmark takes these between its own measurements (`Probe.sample`), since the bandwidth of a shared machine moves by
a factor of two within minutes: a speed and the limit it is compared with must be from the same moment.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bench.stack import provenance
from engine.model.layers import compute_dtype

GEMM_SIZE = 1536
READ_BYTES = 256 << 20
"""Far more than any cache holds."""


@dataclass
class Probe:
    """Samples of the machine's limits. `dtype`: of the weights whose products are to be compared."""

    dtype: torch.dtype = torch.float32
    gemm_flops: list[float] = field(default_factory=list)
    read_bytes: list[float] = field(default_factory=list)
    copy_bytes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        computed_in = compute_dtype(self.dtype, torch.device("cpu"))
        self._a = torch.randn(GEMM_SIZE, GEMM_SIZE).to(computed_in)
        self._b = torch.randn(GEMM_SIZE, GEMM_SIZE).to(computed_in)
        self._memory = torch.ones(READ_BYTES // 4)
        self._target = torch.empty_like(self._memory)
        self.sample()
        for samples in (self.gemm_flops, self.read_bytes, self.copy_bytes):
            samples.clear()  # the first one was warming up

    def sample(self) -> None:
        """Take one sample of each limit; about 0.2 s."""
        self.gemm_flops.append(2 * GEMM_SIZE**3 / best_of(3, lambda: self._a @ self._b))
        self.read_bytes.append(READ_BYTES / best_of(3, self._memory.sum))
        self.copy_bytes.append(READ_BYTES / best_of(2, lambda: self._target.copy_(self._memory)))

    def summary(self) -> str:
        """The medians, and how far they moved."""
        parts = []
        for name, samples, unit, suffix in (
            ("gemm", self.gemm_flops, 1e9, "GF/s"),
            ("read", self.read_bytes, 1e9, "GB/s"),
            ("memcpy", self.copy_bytes, 1e9, "GB/s"),
        ):
            low, middle, high = min(samples) / unit, statistics.median(samples) / unit, max(samples) / unit
            parts.append(f"{name} {middle:.1f} {suffix} ({low:.1f}-{high:.1f})")
        return " · ".join(parts)


def best_of(count: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of `count` runs."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the limits of this machine.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    probe = Probe()
    deadline = time.monotonic() + arguments.seconds
    while not probe.gemm_flops or time.monotonic() < deadline:
        probe.sample()
    print(f"{provenance()} · {arguments.threads} threads")
    print(probe.summary())


if __name__ == "__main__":
    main()

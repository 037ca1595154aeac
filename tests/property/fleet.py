"""The real thing: four engine processes, one store, and routers over them in the test's own loop."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.engines import Engine, engines, wait_until
from tests.property.script import Topology
from tests.router_harness import Front, router_over
from tests.valkey import valkey

LAUNCHER = Path(__file__).with_name("launcher.py")
MAX_MODEL_LEN = 400
PATIENT: dict[str, Any] = {"connect_timeout": 20.0, "probe_timeout": 20.0}
"""The machine that runs the tests may be busy: an engine that is slow is not down."""
RELEASE_SECONDS = 10.0
"""By then every lease of an idle engine has ended."""


@dataclass(frozen=True)
class Shape:
    """One engine's settings: small pools, so that blocks are evicted and leases revoked; short leases; clocks apart."""

    role: str
    clock_offset: float
    num_blocks: int
    max_batched: int
    threshold: int
    decoder_ttl: float = 480.0
    lag: float = 0.0
    """See the launcher."""
    transfer_timeout: float = 20.0
    lease: float = 1.0

    def command(self, model: Path) -> list[str]:
        extra = {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": self.threshold,
            "decoder_kv_blocks_ttl": self.decoder_ttl,
            "kv_lease_duration": self.lease,
            "transfer_timeout": self.transfer_timeout,
        }
        config = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
        return [
            *(sys.executable, str(LAUNCHER), str(self.clock_offset), str(self.lag), "engine"),
            *("--model", str(model), "--role", self.role),
            *("--served-model-name", "tiny", "--threads", "1", "--log-level", "warning", "--dtype", "float32"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", str(self.num_blocks)),
            *("--max-num-batched-tokens", str(self.max_batched), "--max-num-seqs", "8"),
            *("--kv-transfer-config", json.dumps(config)),
        ]


PREFILL = (
    Shape("prefill", 1000.0, num_blocks=36, max_batched=256, threshold=16, lag=0.15),
    Shape("prefill", 0.0, num_blocks=27, max_batched=32, threshold=0, lag=0.15),
)
DECODE = (
    Shape("decode", -1000.0, num_blocks=104, max_batched=256, threshold=16, decoder_ttl=6.0),
    Shape(
        "decode", 500.0, num_blocks=26, max_batched=64, threshold=16, decoder_ttl=2.0, lag=0.1, transfer_timeout=0.08
    ),
)


@dataclass(frozen=True)
class Fleet:
    prefill: list[Engine]
    decode: list[Engine]
    redis: str

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    def check_alive(self) -> None:
        for engine in self.engines:
            log = engine.log.read_text()
            assert engine.process.poll() is None, f"an engine ended with {engine.process.returncode}:\n{log[-3000:]}"
            assert "Traceback" not in log, log[log.index("Traceback") :][:3000]

    def check_released(self) -> None:
        """Nothing runs, so nothing may stay held: neither a lease nor a block."""
        for engine in self.engines:
            wait_until(lambda engine=engine: not held(engine), RELEASE_SECONDS, f"{engine.url} frees all blocks")  # type: ignore[misc]


def held(engine: Engine) -> float:
    metrics = engine.metrics()
    names = ("backhaul_engine_blocks_pinned", "backhaul_engine_leases_held", "vllm:kv_cache_usage_perc")
    return sum(metrics[name] for name in names)


@contextmanager
def fleet(model: Path, folder: Path) -> Iterator[Fleet]:
    commands = [shape.command(model) for shape in (*PREFILL, *DECODE)]
    with valkey(folder) as store, engines(folder, *commands) as started:
        yield Fleet(started[: len(PREFILL)], started[len(PREFILL) :], store.url)


@dataclass(frozen=True)
class Routers:
    """Two over each topology, all with one store."""

    fronts: dict[Topology, tuple[Front, Front]] = field(default_factory=dict)

    @property
    def all(self) -> list[Front]:
        return [front for pair in self.fronts.values() for front in pair]


@asynccontextmanager
async def routers(fleet: Fleet) -> AsyncIterator[Routers]:
    """Of each pair, the first pulls whatever it can; the second leaves short suffixes to decode engines. One forgets
    conversations before the engines do, the others after them."""
    async with AsyncExitStack() as stack:

        async def start(size: int, **settings: Any) -> Front:
            prefill, decode = ([engine.url for engine in pool[:size]] for pool in (fleet.prefill, fleet.decode))
            return await stack.enter_async_context(router_over(prefill, decode, fleet.redis, **PATIENT, **settings))

        yield Routers(
            {
                "1P1D": (
                    await start(1, conversation_ttl=20.0, kv_recompute_threshold=0, decode_only_tokens=0),
                    await start(1, conversation_ttl=1.6, kv_recompute_threshold=16),
                ),
                "2P2D": (
                    await start(2, conversation_ttl=20.0, kv_recompute_threshold=16, decode_only_tokens=0),
                    await start(2, conversation_ttl=20.0, kv_recompute_threshold=0, decode_only_tokens=24),
                ),
            }
        )

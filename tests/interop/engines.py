"""vLLM engines as processes: what they are started with, whether they are ready, what they count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.interop import environment
from tests.valkey import free_port

MODEL: Final = "smollm2"
BLOCK_SIZE: Final = 32
"""A multiple of 32 is what vLLM's CPU backend takes."""
START_SECONDS: Final = 400.0
LEASE_SECONDS: Final = 300
"""Of what prefill holds for decode. The default of 30 ends under requests of a machine too busy to look in on them."""
STREAM_PARAMS: Final = Path(__file__).with_name("stream_params.py")


@dataclass
class VLLM:
    """One engine. It keeps its ports when it is started again, as an engine behind a service name would."""

    name: str
    logs: Path
    kv: bool = True
    """Whether it exchanges KV; without, it has no cache at all and computes every prompt."""
    params_in_streams: bool = False
    """Whether its streams carry transfer params, as those of 0.33 do."""
    offer_seconds: float = 60.0
    """decoder_kv_blocks_ttl. Short, since an engine that holds blocks for a reader never rests: it looks out for it."""
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        python = environment.python()
        start = [str(python), str(STREAM_PARAMS)] if self.params_in_streams else [str(python.with_name("vllm"))]
        command = [
            *(*start, "serve", str(environment.model()), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", environment.DTYPE, "--max-model-len", "4096", "--block-size", str(BLOCK_SIZE)),
            *("--enforce-eager", "--disable-uvicorn-access-log"),
            # The worker in the engine's own process: with few cores, news between the two may take a minute.
            *("--distributed-executor-backend", "uni"),
        ]
        if not self.kv:
            return [*command, "--no-enable-prefix-caching"]
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "bidirectional_kv_xfer": True,
                "kv_recompute_threshold": 0,  # answers are short here, and a short pull is one all the same
                "decoder_kv_blocks_ttl": self.offer_seconds,
                "kv_lease_duration": LEASE_SECONDS,
            },
        }
        return [*command, "--kv-transfer-config", json.dumps(transfer)]

    def start(self) -> None:
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU's platform has none but "mp"
            "OMP_NUM_THREADS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
        }
        with (self.logs / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def wait(self) -> None:
        """Until it lists its models."""
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready():
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} ended: see {self.logs}/{self.name}.log"
            assert time.monotonic() < deadline, f"{self.name} is not ready: see {self.logs}/{self.name}.log"
            time.sleep(0.5)

    def is_ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.url + "/v1/models", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def kill(self) -> None:
        """End it with its workers, which are of its process group, without a chance to say so."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None

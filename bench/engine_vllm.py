"""vLLM's engine as a worker of `bench.engine_peers`, in this process and without a server.

    VENV/bin/python -m bench.engine_vllm MODEL_FOLDER [--dtype float32]

Runs in an environment of its own. Its settings are vLLM's defaults, torch.compile included, but for the prefix cache,
which would answer repeated prompts. A step is one of the engine, its scheduler and sampler included.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine_worker import median_seconds, serve

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 32
KV_GIB = 4


def environment(threads: int) -> dict[str, str]:
    """For the process that runs a vLLM, this one or a server."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # The worker in the engine's own process: with few cores, messages between the two are slow.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


class VLLM:
    """Implements bench.engine_worker.Measured."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        llm = self._vllm.LLM(
            model=str(model),
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
        )
        self._engine: Any = llm.llm_engine
        self._dtype = dtype
        self._num_requests = 0
        self._open: list[str] = []

    def about(self) -> str:
        return f"vLLM {self._vllm.__version__} ({self._dtype})"

    def prefill(self, prompt: Sequence[int]) -> float:
        started = time.perf_counter()
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started

    def open(self, prompt: Sequence[int], batch: int) -> None:
        self._open = [self._add(prompt, MAX_MODEL_LEN - len(prompt)) for _ in range(batch)]
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}

    def decode(self, steps: int) -> float:
        return median_seconds(steps, self._engine.step)

    def close(self) -> None:
        self._engine.abort_request(self._open)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM, to be measured.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    serve(lambda: VLLM(arguments.model, arguments.dtype))


if __name__ == "__main__":
    main()

"""The engine's model runner beside llama.cpp and vLLM for CPUs: same model, threads and prompts, in one run.

    python -m bench.engine_peers [--llama VENV] [--vllm VENV] [--threads 2] [--rounds 3]
                                 [--prefills 512,2048] [--batches 1,8,32] [--contexts 256,1024]

`--llama`: an environment with xllamacpp (`python -m venv VENV; VENV/bin/pip install xllamacpp`); it reads the same
quantised file. `--vllm`: one with vLLM (`python -m tests.interop.environment` makes one and prints where); it reads
the same weights in float32. A peer that is not given is left out. Each has a process of its own (`bench.engine_llama`,
`bench.engine_vllm`); ours are in this one, exact and with `--quantization int8`.

Rounds: a probe of the machine, then each engine once, whoever was first in one round last in the next. A prefill is
one prompt; a round of decoding is 16 steps, each a token for every sequence, going on where the last round ended. All
figures are medians over the rounds, ratios those of each round; "of limit" as in `bench.engine`. Ours and vLLM sample
greedily, llama.cpp does not sample; vLLM's steps have its scheduler in them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import engine_vllm
from bench.engine import BLOCK_SIZE, DECODE_STEPS, DEFAULT_MODEL, Line, Ours, lines, numbers
from bench.engine_worker import Measured, Worker, median_seconds
from bench.probe import Probe
from bench.stack import provenance
from engine.batch import Batch, ScheduledRequest
from engine.kv_cache import KVCache, KVLayout
from engine.model.loader import LoadedModel, load_model
from engine.request import Request
from engine.runner import Runner
from tests.interop import environment

EXACT, INT8 = "exact", "int8"
DTYPE = torch.float32


class Backhaul:
    """Implements bench.engine_worker.Measured."""

    def __init__(self, loaded: LoadedModel, max_tokens: int, max_batch: int, room: int) -> None:
        """`max_tokens`: of all open sequences; `room`: the most that one of them can be decoded."""
        config = loaded.config
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, DTYPE)
        num_blocks = max_tokens // BLOCK_SIZE + max_batch
        self._runner = Runner(loaded, KVCache(layout, num_blocks), max_num_seqs=max_batch)
        self._ours = Ours(self._runner, num_blocks)
        self._room = room
        self._requests: list[Request] = []

    def about(self) -> str:
        return "Backhaul"

    def prefill(self, prompt: Sequence[int]) -> float:
        return self._ours.prefill(list(prompt))

    def open(self, prompt: Sequence[int], batch: int) -> None:
        self._requests = self._ours.requests([list(prompt)] * batch, self._room)
        first = self._requests[0]
        (token,) = self._runner.run(Batch([ScheduledRequest(first, 0, len(prompt))])).token_ids
        arena = self._runner.cache.arena
        for request in self._requests:
            if request is not first:
                arena[request.block_ids] = arena[first.block_ids]
            request.append(token)

    def decode(self, steps: int) -> float:
        return median_seconds(steps, self._step)

    def close(self) -> None:
        self._requests = []

    def _step(self) -> None:
        batch = Batch([ScheduledRequest(request, request.num_tokens - 1, 1) for request in self._requests])
        for request, token in zip(self._requests, self._runner.run(batch).token_ids, strict=True):
            request.append(token)


@dataclass
class Result:
    """Of one line: seconds by engine, one of each round, and our shares of the machine's limit."""

    seconds: dict[str, list[float]]
    shares: dict[str, list[float]]
    limits: dict[str, str] = field(default_factory=dict)

    def ratio(self, ours: str, peer: str) -> float:
        pairs = zip(self.seconds[ours], self.seconds[peer], strict=True)
        return statistics.median(theirs / own for own, theirs in pairs)


@contextmanager
def opened(engines: Mapping[str, Measured], line: Line) -> Iterator[None]:
    """The engines warm, and with the line's sequences if it is one of decoding."""
    for engine in engines.values():
        if line.decode:
            engine.open(line.prompts[0], len(line.prompts))
            engine.decode(2)
        else:
            engine.prefill(line.prompts[0])
    yield
    if line.decode:
        for engine in engines.values():
            engine.close()


def measure(engines: Mapping[str, Measured], own: Mapping[str, Line], rounds: int, probe: Probe) -> Result:
    """`own`: the line as it is for each of ours; they differ in the bytes that are read."""
    line = own[EXACT]
    result = Result({name: [] for name in engines}, {name: [] for name in own})
    with opened(engines, line):
        order = list(engines)
        for _ in range(rounds):
            probe.sample()
            for name in order:
                engine = engines[name]
                spent = engine.decode(DECODE_STEPS) if line.decode else engine.prefill(line.prompts[0])
                result.seconds[name].append(spent)
                probe.sample()
                if name in own:
                    rates = max(probe.gemm_flops[-2:]), max(probe.read_bytes[-2:])
                    least, result.limits[name] = own[name].least_time(*rates)
                    result.shares[name].append(least / spent)
            order.append(order.pop(0))
    return result


def row(line: Line, result: Result, peers: Sequence[str]) -> str:
    def speed(name: str) -> str:
        return f"{line.tokens / statistics.median(result.seconds[name]):.0f}"

    cells = [line.name]
    for name in (EXACT, INT8):
        cells += [speed(name), f"{statistics.median(result.shares[name]):.2f} {result.limits[name]}"]
    for peer in peers:
        cells += [speed(peer), f"{result.ratio(EXACT, peer):.2f}x", f"{result.ratio(INT8, peer):.2f}x"]
    return f"| {' | '.join(cells)} |"


def start(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, Worker]:
    threads = ["--threads", str(arguments.threads)]
    found = {}
    if arguments.llama:
        model = [str(arguments.model), *threads]
        env = {"OMP_NUM_THREADS": str(arguments.threads)}
        found["llama.cpp"] = Worker(arguments.llama / "bin/python", "bench.engine_llama", model, env)
        stack.callback(found["llama.cpp"].end)
    if arguments.vllm:
        folder = str(arguments.vllm_model or environment.model())
        env = engine_vllm.environment(arguments.threads)
        found["vLLM"] = Worker(arguments.vllm / "bin/python", "bench.engine_vllm", [folder], env)
        stack.callback(found["vLLM"].end)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine's model runner beside other engines.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a GGUF file")
    parser.add_argument("--llama", type=Path, help="environment with xllamacpp")
    parser.add_argument("--vllm", type=Path, help="environment with vLLM")
    parser.add_argument("--vllm-model", type=Path, help="the model as a folder; default: made of the small one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefills", default="512,2048", help="prompt lengths, separated by commas; may be empty")
    parser.add_argument("--batches", default="1,8,32", help="decode batch sizes; may be empty")
    parser.add_argument("--contexts", default="256,1024", help="tokens before each decoded one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prefills, batches, contexts = map(numbers, (arguments.prefills, arguments.batches, arguments.contexts))
    room = (arguments.rounds + 1) * DECODE_STEPS
    max_batch = max(batches, default=1)
    max_tokens = max([*prefills, max_batch * (max(contexts, default=0) + room)])
    with ExitStack() as stack:
        peers = start(stack, arguments)
        engines: dict[str, Measured] = {}
        tables = []
        for name in (EXACT, INT8):
            loaded = load_model(arguments.model, dtype=DTYPE, quantization="int8" if name == INT8 else None)
            tables.append(lines(loaded, DTYPE, prefills, batches, contexts, quantized=True))
            engines[name] = Backhaul(loaded, max_tokens, max_batch, room)
            model_name = loaded.name
            del loaded
        engines |= peers
        probe = Probe(DTYPE)
        print(f"{provenance()} · torch {torch.__version__}")
        print(f"{model_name} · {arguments.threads} threads · {arguments.rounds} rounds, medians")
        print(*(peer.about() for peer in peers.values()), sep=" · ", end="\n\n")
        heads = ["tok/s", "ours, exact", "of limit", "ours, int8", "of limit"]
        for name in peers:
            heads += [name, "exact by it", "int8 by it"]
        print(f"| {' | '.join(heads)} |\n| --- |{' ---: |' * (len(heads) - 1)}")
        for exact, int8 in zip(*tables, strict=True):
            result = measure(engines, {EXACT: exact, INT8: int8}, arguments.rounds, probe)
            print(row(exact, result, list(peers)), flush=True)
        print(f"\nprobes: {probe.summary()}")


if __name__ == "__main__":
    main()

"""The engine's model runner against the machine's limits and against transformers, all in one run.

    python -m bench.engine [--model PATH] [--dtype float32] [--threads N] [--rounds 3] [--batches 1,8]
                           [--prefills 512,2048] [--contexts 256] [--quantization int8]

Rounds alternate between a probe of the machine, our runner and transformers, for each line of the table; each figure
is the median over the rounds. "of limit" is the time the machine would need at the least, over the time taken: all
operations at the matrix-product rate, or all weights and KV at the read bandwidth, whichever is longer (named), by the
probes taken just before and after.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.probe import Probe
from bench.stack import provenance
from engine.batch import Batch, ScheduledRequest
from engine.kv_cache import KVCache, KVLayout
from engine.model.config import ModelConfig
from engine.model.llama import head_name
from engine.model.loader import LoadedModel, load_model
from engine.request import Request, SamplingParams
from engine.runner import Runner

DEFAULT_MODEL = Path.home() / ".cache/backhaul/models/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK_SIZE = 16
DECODE_STEPS = 16


class Ours:
    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self.runner = runner
        self.num_blocks = num_blocks

    def requests(self, prompts: list[list[int]], room: int) -> list[Request]:
        free = random.Random(0).sample(range(self.num_blocks), self.num_blocks)
        requests = []
        for index, prompt in enumerate(prompts):
            request = Request(str(index), prompt, SamplingParams(temperature=0.0), frozenset(), BLOCK_SIZE, b"seed")
            request.block_ids = [free.pop() for _ in range(-(-(len(prompt) + room) // BLOCK_SIZE))]
            requests.append(request)
        return requests

    def prefill(self, prompt: list[int]) -> float:
        (request,) = self.requests([prompt], 0)
        batch = Batch([ScheduledRequest(request, 0, len(prompt))])
        return seconds(lambda: self.runner.run(batch))

    def decode(self, prompts: list[list[int]]) -> float:
        """Seconds per step, the median of DECODE_STEPS."""
        requests = self.requests(prompts, DECODE_STEPS + 1)
        for request in requests:
            request.append(self.runner.run(Batch([ScheduledRequest(request, 0, request.num_tokens)])).token_ids[0])
        times = []
        for _ in range(DECODE_STEPS):
            batch = Batch([ScheduledRequest(request, request.num_tokens - 1, 1) for request in requests])
            started = time.perf_counter()
            tokens = self.runner.run(batch).token_ids
            times.append(time.perf_counter() - started)
            for request, token in zip(requests, tokens, strict=True):
                request.append(token)
        return statistics.median(times)


class Theirs:
    """transformers on the same weights, with its key-value cache."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        import transformers

        if config.rope_scaling is not None:
            raise SystemExit("models with rope scaling are not compared here; use --without-transformers")
        fields: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        their_config = transformers.AutoConfig.for_model(config.architecture, **fields)
        self.model = transformers.AutoModelForCausalLM.from_config(their_config, dtype=dtype).eval()
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or [name for name in missing if name != "lm_head.weight"]:
            raise SystemExit(f"weights do not fit transformers' model: {[*missing, *unexpected][:3]}")

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        ids = torch.tensor([prompt])
        return seconds(lambda: self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1))

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]]) -> float:
        output = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(DECODE_STEPS):
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            started = time.perf_counter()
            output = self.model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            output.logits.argmax(-1)
            times.append(time.perf_counter() - started)
        return statistics.median(times)


@dataclass(frozen=True)
class Line:
    name: str
    tokens: int
    """Per measured unit: a prefill, or a step."""
    flops: float
    read_bytes: float
    """Weights, in the form they are kept in, and KV."""
    decode: bool
    prompts: list[list[int]]
    """One for each sequence, all of the same length."""

    def least_time(self, gemm_flops: float, read_bytes: float) -> tuple[float, str]:
        """Seconds on a machine of these rates, and which of them it is that matters."""
        return max((self.flops / gemm_flops, "gemm"), (self.read_bytes / read_bytes, "read"))

    def measure(self, engine: Ours | Theirs) -> float:
        return engine.decode(self.prompts) if self.decode else engine.prefill(self.prompts[0])


def lines(
    loaded: LoadedModel,
    dtype: torch.dtype,
    prefills: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    quantized: bool,
) -> list[Line]:
    """The rows of the table; `dtype`: of the KV; `quantized`: whether weights are read as the file has them."""
    config = loaded.config
    chooser = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [chooser.randrange(config.vocab_size) for _ in range(length)]

    def stored(name: str) -> int:
        kept = loaded.quantized.get(name) if quantized else None
        return loaded.weights[name].nbytes if kept is None else kept.num_bytes

    layers = [name for name in loaded.weights if name.startswith("model.layers.")]
    matrices = sum(loaded.weights[name].numel() for name in layers)
    head = config.vocab_size * config.hidden_size
    weight_bytes = sum(map(stored, [*layers, head_name(config)]))
    width = config.num_heads * config.head_dim
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    found = []
    for length in prefills:
        # Scores and weighted values, each over half of the square.
        attention = 2 * config.num_layers * width * length**2
        flops = 2 * matrices * length + attention
        found.append(Line(f"prefill {length}", length, flops, weight_bytes, False, [prompt(length)]))
    for length, batch in itertools.product(contexts, batches):
        context = length + DECODE_STEPS // 2
        read = weight_bytes + batch * context * kv_bytes
        prompts = [prompt(length) for _ in range(batch)]
        flops = 2 * batch * (matrices + head) + 4 * batch * context * config.num_layers * width
        found.append(Line(f"decode batch {batch}, context {length}", batch, flops, read, True, prompts))
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine's model runner.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefills", default="512,2048", help="prompt lengths, separated by commas; may be empty")
    parser.add_argument("--batches", default="1,8", help="decode batch sizes, separated by commas")
    parser.add_argument("--contexts", default="256", help="tokens before each decoded one, separated by commas")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--without-kernels", action="store_true", help="measure the torch fallback")
    parser.add_argument("--without-transformers", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    prefills, batches, contexts = map(numbers, (arguments.prefills, arguments.batches, arguments.contexts))

    loaded = load_model(arguments.model, dtype=dtype, quantization=arguments.quantization)
    config = loaded.config
    table = lines(loaded, dtype, prefills, batches, contexts, quantized=not arguments.without_kernels)
    longest = max([*prefills, max(batches) * (max(contexts) + DECODE_STEPS + BLOCK_SIZE)])
    num_blocks = longest // BLOCK_SIZE + 1
    cache = KVCache(KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype), num_blocks)
    runner = Runner(loaded, cache, max_num_seqs=max(batches), use_kernels=not arguments.without_kernels)
    ours = Ours(runner, num_blocks)
    theirs = None if arguments.without_transformers else Theirs(config, loaded.weights, dtype)
    probe = Probe(dtype)

    print(f"{provenance()} · torch {torch.__version__}")
    settings = [loaded.name, arguments.dtype, f"quantization {arguments.quantization}", f"{arguments.threads} threads"]
    print(f"{' · '.join(settings)} · {arguments.rounds} rounds, medians\n")
    print(f"{'':28}{'tok/s':>9}{'of limit':>15}{'transformers':>14}{'ratio':>8}")
    for line in table:
        shares, our_times, their_times = [], [], []
        line.measure(ours)  # warm
        for _ in range(arguments.rounds):
            probe.sample()
            our_times.append(line.measure(ours))
            probe.sample()
            least, limit = line.least_time(max(probe.gemm_flops[-2:]), max(probe.read_bytes[-2:]))
            shares.append(least / our_times[-1])
            if theirs is not None:
                their_times.append(line.measure(theirs))
        share = f"{statistics.median(shares):.2f} {limit}"
        row = f"{line.name:28}{line.tokens / statistics.median(our_times):>9.1f}{share:>15}"
        if their_times:
            ratio = statistics.median(their / our for our, their in zip(our_times, their_times, strict=True))
            row += f"{line.tokens / statistics.median(their_times):>14.1f}{ratio:>7.1f}x"
        print(row, flush=True)
    print(f"\nprobes: {probe.summary()}")


if __name__ == "__main__":
    main()

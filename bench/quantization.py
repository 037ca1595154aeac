"""What `--quantization int8` costs in accuracy: perplexity of a text, and agreement of the likeliest next tokens.

    python -m bench.quantization [--model PATH] [--dtype bfloat16] [--text docs/life-of-a-turn.md] [--tokens 1024]

Three ways through the same model: exact; int8 with the weights the file holds (of a file that holds few bits, only the
products differ); and int8 with the weights in `dtype` rounded to 8 bits, as it is for a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch

from bench.engine import BLOCK_SIZE, DEFAULT_MODEL
from bench.parity import prompts
from bench.stack import provenance
from engine.batch import Batch, ScheduledRequest
from engine.kv_cache import KVCache, KVLayout
from engine.logprobs import TokenLogprobs
from engine.model.int8 import to_int8
from engine.model.loader import LoadedModel, load_model
from engine.request import Request, SamplingParams
from engine.runner import Runner

TEXT = Path(__file__).parents[1] / "docs" / "life-of-a-turn.md"
WINDOW = 512
"""Tokens that see each other."""


def variants(path: Path, dtype: torch.dtype) -> dict[str, LoadedModel]:
    exact = load_model(path, dtype=dtype)
    weights, quantized = to_int8(exact.config, exact.weights, {})
    return {
        "exact": exact,
        "int8, weights as in the file": load_model(path, dtype=dtype, quantization="int8"),
        "int8, weights rounded": replace(exact, weights=weights, quantized=quantized, quantization="int8"),
    }


def read(runner: Runner, window: list[int]) -> list[TokenLogprobs]:
    """How likely each token of a text was, but for the first, and which was the likeliest."""
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    request = Request("text", window, sampling, frozenset(), BLOCK_SIZE, b"seed")
    request.block_ids = list(range(runner.cache.num_blocks))
    result = runner.run(Batch([ScheduledRequest(request, 0, len(window))]))
    return list(result.prompt_logprobs[request.request_id])


def answer(runner: Runner, prompt: list[int], count: int) -> list[int]:
    """The first tokens of the greedy one."""
    request = Request("answer", prompt, SamplingParams(temperature=0.0), frozenset(), BLOCK_SIZE, b"seed")
    request.block_ids = list(range(runner.cache.num_blocks))
    computed = 0
    for _ in range(count):
        scheduled = ScheduledRequest(request, computed, request.num_tokens - computed)
        computed = request.num_tokens
        request.append(runner.run(Batch([scheduled])).token_ids[0])
    return request.token_ids[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the accuracy of int8.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1024, help="of the text")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--answer", type=int, default=16, help="tokens of each greedy answer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype: torch.dtype = getattr(torch, args.dtype)
    likely: dict[str, list[TokenLogprobs]] = {}
    answers: dict[str, list[list[int]]] = {}
    models = variants(args.model, dtype)
    tokenizer, config = models["exact"].tokenizer, models["exact"].config
    tokens = tokenizer.encode(args.text.read_text(), add_special_tokens=False)[: args.tokens]
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
    questions = prompts(models["exact"], args.prompts)
    longest = max(WINDOW, max(map(len, questions)) + args.answer)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    for name, model in models.items():
        runner = Runner(model, KVCache(layout, longest // BLOCK_SIZE + 2), max_num_seqs=1)
        likely[name] = [told for window in windows for told in read(runner, window)]
        answers[name] = [answer(runner, question, args.answer) for question in questions]

    print(f"{provenance()}\n{models['exact'].name} · {args.dtype} · {len(tokens)} tokens of {args.text.name}\n")
    print(f"{'':32}{'perplexity':>12}{'same likeliest token':>24}{'equal greedy answers':>24}")
    for name in models:
        perplexity = math.exp(-sum(told.logprob for told in likely[name]) / len(likely[name]))
        pairs = zip(likely[name], likely["exact"], strict=True)
        same = sum(told.top[0][0] == other.top[0][0] for told, other in pairs) / len(likely[name])
        equal = sum(a == b for a, b in zip(answers[name], answers["exact"], strict=True))
        print(f"{name:32}{perplexity:>12.3f}{f'{same:.1%}':>24}{f'{equal} of {len(questions)}':>24}")


if __name__ == "__main__":
    main()

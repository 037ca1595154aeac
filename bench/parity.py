"""How often greedy answers equal those of transformers on the same weights, and how far the logits are apart.

    python -m bench.parity [--model PATH] [--dtype bfloat16] [--prompts 20] [--tokens 16]

Two references: transformers in the same dtype, and transformers in float32 on the weights rounded to it, which is what
the dtype would give without rounding in between. Where the engine keeps its activations in float32 (a CPU without
bfloat16 products) it is the second one it should equal.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engine import BLOCK_SIZE, DEFAULT_MODEL, Theirs
from bench.stack import provenance
from engine.batch import Batch, ScheduledRequest
from engine.kv_cache import KVCache, KVLayout
from engine.model.loader import LoadedModel, load_model
from engine.request import Request, SamplingParams
from engine.runner import Runner

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 400)
SENTENCES = (
    "The harbour was quiet when the last train left for the north, carrying copper and letters nobody had read.",
    "In winter the river froze, and children crossed it on their way to school.",
    "A captain wrote every price he could remember into a narrow book.",
    "Later a teacher asked which year had been the coldest, and why the lamps were green.",
)

NextLogits = Callable[[list[int]], Tensor]
"""(tokens not seen yet) -> float32 logits [vocab] of the token after them."""


def prompts(loaded: LoadedModel, count: int) -> list[list[int]]:
    chooser = random.Random(0)
    texts = (" ".join(chooser.choice(SENTENCES) for _ in range(40)) for _ in range(count))
    lengths = (LENGTHS[index % len(LENGTHS)] for index in range(count))
    return [loaded.tokenizer.encode(text, add_special_tokens=False)[:n] for text, n in zip(texts, lengths, strict=True)]


def ours(runner: Runner) -> NextLogits:
    request = Request("parity", [], SamplingParams(temperature=0.0), frozenset(), BLOCK_SIZE, b"seed")
    request.block_ids = list(range(1, runner.cache.num_blocks))

    def step(tokens: list[int]) -> Tensor:
        start = request.num_tokens
        request.token_ids += tokens
        return runner.logits(Batch([ScheduledRequest(request, start, len(tokens))]))[0].float()

    return step


def theirs(model: Any) -> NextLogits:
    cache: Any = None

    @torch.inference_mode()
    def step(tokens: list[int]) -> Tensor:
        nonlocal cache
        output = model(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits: Tensor = output.logits[0, -1].float()
        return logits

    return step


def greedy(step: NextLogits, prompt: list[int], tokens: int) -> tuple[list[int], Tensor]:
    """The answer, and the logits of its first token."""
    logits = first = step(prompt)
    answer = [int(logits.argmax())]
    while len(answer) < tokens:
        answer.append(int(step(answer[-1:]).argmax()))
    return answer, first


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare greedy answers and logits with transformers.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    dtype: torch.dtype = getattr(torch, args.dtype)
    loaded = load_model(args.model, dtype=dtype)
    config = loaded.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    cache = KVCache(layout, (max(LENGTHS) + args.tokens) // BLOCK_SIZE + 2)
    references = {f"transformers {args.dtype}": Theirs(config, loaded.weights, dtype).model}
    if dtype != torch.float32:
        exact = {name: weight.float() for name, weight in loaded.weights.items()}
        references["transformers float32, same weights"] = Theirs(config, exact, torch.float32).model
    runner = Runner(loaded, cache, max_num_seqs=1)

    questions = prompts(loaded, args.prompts)
    answers = {"engine": [greedy(ours(runner), question, args.tokens) for question in questions]}
    for name, model in references.items():
        answers[name] = [greedy(theirs(model), question, args.tokens) for question in questions]

    print(f"{provenance()}\n{loaded.name} · {args.dtype} · {args.prompts} prompts, {args.tokens} tokens each, greedy\n")
    print(f"{'':72}{'equal texts':>14}{'largest logit difference':>27}")
    for one, other in itertools.combinations(answers, 2):
        pairs = list(zip(answers[one], answers[other], strict=True))
        equal = sum(text(loaded, a) == text(loaded, b) for (a, _), (b, _) in pairs)
        apart = max(float((a - b).abs().max()) for (_, a), (_, b) in pairs)
        print(f"{one + ' against ' + other:72}{f'{equal} of {len(pairs)}':>14}{apart:>27.4f}", flush=True)


def text(loaded: LoadedModel, token_ids: list[int]) -> str:
    return loaded.tokenizer.decode(token_ids, skip_special_tokens=False)


if __name__ == "__main__":
    main()

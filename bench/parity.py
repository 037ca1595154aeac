"""How often greedy answers equal those of transformers on the same weights, and how far the logits are apart.

    python -m bench.parity [--model PATH] [--dtype bfloat16] [--prompts 20] [--tokens 16] [--arithmetic both]

Prompts are cuts of plain text of given lengths and, every other one, questions through the chat template. As in the
stack one engine computes a prompt; another, given a copy of its blocks, the prompt's last token again and the answer.

References: transformers in the same dtype; where that is not float32 also with its other attention ("eager"), which
differs in nothing but where it rounds and so shows how far apart two right evaluations are; and transformers in float32
on the weights rounded to the dtype, which is what the dtype would give without rounding in between.

Where a device has no bfloat16 products the engine keeps its activations in float32 ("fastest" arithmetic) and should
equal the last one. Activations in the dtype itself ("native") are for devices that have them, and slow elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engine import BLOCK_SIZE, DEFAULT_MODEL, Theirs
from bench.stack import provenance
from engine.batch import Batch, ScheduledRequest
from engine.kv_cache import KVCache, KVLayout
from engine.model.layers import compute_dtype
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

QUESTIONS = (
    "What is {}?",
    "Explain {} to a child in two sentences.",
    "Write a short poem about {}.",
    "Give me three facts about {}.",
    "Why do people care about {}?",
)
SUBJECTS = (
    "gravity", "the French Revolution", "photosynthesis", "a good night's sleep", "the moon", "recursion", "bread",
    "inflation", "the Sahara", "a fair coin", "jazz", "plate tectonics", "honesty", "chess", "vaccines", "rain",
)  # fmt: skip

NextLogits = Callable[[list[int]], Tensor]
"""(tokens not seen yet) -> float32 logits [vocab] of the token after them."""


def prompts(loaded: LoadedModel, count: int) -> list[list[int]]:
    """Alternately a cut of plain text and a chat with one question."""
    tokenizer, chooser = loaded.tokenizer, random.Random(0)
    found = []
    for index in range(count):
        if index % 2 and tokenizer.has_chat_template:
            question = chooser.choice(QUESTIONS).format(chooser.choice(SUBJECTS))
            content = tokenizer.render_chat([{"role": "user", "content": question}])
            found.append(tokenizer.encode(content, add_special_tokens=False))
        else:
            text = " ".join(chooser.choice(SENTENCES) for _ in range(40))
            found.append(tokenizer.encode(text, add_special_tokens=False)[: LENGTHS[index // 2 % len(LENGTHS)]])
    return found


def ours(prefill: Runner, decode: Runner) -> NextLogits:
    request = Request("parity", [], SamplingParams(temperature=0.0), frozenset(), BLOCK_SIZE, b"seed")
    request.block_ids = list(range(1, decode.cache.num_blocks))

    def step(tokens: list[int]) -> Tensor:
        start = request.num_tokens
        request.token_ids += tokens
        if len(tokens) > 1:
            prefill.logits(Batch([ScheduledRequest(request, start, len(tokens))]))
            decode.cache.arena.copy_(prefill.cache.arena)
            start = request.num_tokens - 1
        return decode.logits(Batch([ScheduledRequest(request, start, request.num_tokens - start)]))[0].float()

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


def evaluations(
    loaded: LoadedModel, dtype: torch.dtype, arithmetic: str, max_tokens: int
) -> Iterator[tuple[str, Callable[[], NextLogits]]]:
    """What is compared, by name: a function that starts a sequence."""
    config, fastest = loaded.config, compute_dtype(dtype, torch.device("cpu"))
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    for activations in dict.fromkeys({"fastest": [fastest], "native": [dtype], "both": [fastest, dtype]}[arithmetic]):
        caches = [KVCache(layout, max_tokens // BLOCK_SIZE + 2) for _ in range(2)]
        prefill, decode = (Runner(loaded, cache, max_num_seqs=1, activations=activations) for cache in caches)
        yield f"engine, {_name(activations)} arithmetic", partial(ours, prefill, decode)
    same = Theirs(config, loaded.weights, dtype).model
    yield f"transformers {_name(dtype)}", partial(theirs, same)
    if dtype == torch.float32:
        return
    same.set_attn_implementation("eager")
    yield f"transformers {_name(dtype)}, eager", partial(theirs, same)
    exact = Theirs(config, {name: weight.float() for name, weight in loaded.weights.items()}, torch.float32).model
    yield "transformers float32", partial(theirs, exact)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare greedy answers and logits with transformers.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--arithmetic", choices=["fastest", "native", "both"], default="both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype: torch.dtype = getattr(torch, args.dtype)
    loaded = load_model(args.model, dtype=dtype)
    questions = prompts(loaded, args.prompts)
    answers = {}
    for name, start in evaluations(loaded, dtype, args.arithmetic, max(map(len, questions)) + args.tokens):
        answers[name] = [greedy(start(), question, args.tokens) for question in questions]
        print(f"done: {name}", file=sys.stderr, flush=True)

    print(f"{provenance()}\n{loaded.name} · {args.dtype} · {args.prompts} prompts, {args.tokens} tokens each, greedy\n")
    print(f"{'':64}{'equal texts':>14}{'largest logit difference':>27}")
    for one, other in itertools.combinations(answers, 2):
        pairs = list(zip(answers[one], answers[other], strict=True))
        equal = sum(text(loaded, a) == text(loaded, b) for (a, _), (b, _) in pairs)
        apart = max(float((a - b).abs().max()) for (_, a), (_, b) in pairs)
        print(f"{one + ' against ' + other:64}{f'{equal} of {len(pairs)}':>14}{apart:>27.4f}", flush=True)


def text(loaded: LoadedModel, token_ids: list[int]) -> str:
    return loaded.tokenizer.decode(token_ids, skip_special_tokens=False)


if __name__ == "__main__":
    main()

"""Running tiny models in tests: our runner, and transformers on the same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch, ScheduledRequest
from engine.kv_cache import KVCache, KVLayout
from engine.model.loader import LoadedModel, load_model
from engine.request import Request, SamplingParams
from engine.runner import Runner
from tests.tiny import VOCAB_SIZE, make_tiny

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Machine:
    """A runner with its cache, handing out blocks in random order."""

    loaded: LoadedModel
    cache: KVCache
    runner: Runner
    free: list[int]

    def request(
        self, token_ids: Sequence[int], sampling: SamplingParams = GREEDY, *, room: int = 64, request_id: str = "r"
    ) -> Request:
        """A request with blocks for its tokens and `room` more."""
        request = Request(request_id, list(token_ids), sampling, frozenset({0}), BLOCK_SIZE, b"seed")
        request.block_ids = [self.free.pop() for _ in range(-(-(len(token_ids) + room) // BLOCK_SIZE))]
        return request

    def prefill(self, request: Request, chunk: int | None = None) -> Tensor:
        """Logits [vocab] after the request's tokens, computed `chunk` at a time."""
        chunk = chunk or request.num_tokens
        for start in range(0, request.num_tokens, chunk):
            count = min(chunk, request.num_tokens - start)
            logits = self.runner.logits(Batch([ScheduledRequest(request, start, count)]))
        return logits[0]

    def decode(self, *requests: Request) -> Tensor:
        """Logits [requests, vocab] after computing each request's last token alone."""
        return self.runner.logits(Batch([last_token(request) for request in requests]))


def last_token(request: Request) -> ScheduledRequest:
    return ScheduledRequest(request, request.num_tokens - 1, 1)


def make_machine(
    folder: Path, *, dtype: torch.dtype = torch.float32, use_kernels: bool = True, num_blocks: int = 256, **tiny: Any
) -> Machine:
    if not (folder / "config.json").exists():
        make_tiny(folder, **tiny)
    loaded = load_model(folder, dtype=dtype)
    config = loaded.config
    cache = KVCache(KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype), num_blocks)
    runner = Runner(loaded, cache, max_num_seqs=8, use_kernels=use_kernels)
    free = list(range(num_blocks))
    random.Random(0).shuffle(free)
    return Machine(loaded, cache, runner, free)


def reference_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Float32 logits [tokens, vocab] of every position."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0].float()
    return logits


def random_tokens(count: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(1, VOCAB_SIZE) for _ in range(count)]

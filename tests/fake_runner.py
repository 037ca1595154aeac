"""A runner without a model, whose KV says what it was computed from.

The KV of a token is a digest of the whole prefix up to it. Computing a token reads the KV of everything before it from
the blocks it was given, and refuses what is not that of the request's own tokens: reading a block that was recycled,
not yet filled or never transferred is a `WrongKV`, not a slightly different number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.batch import Batch, StepResult
from engine.grammar import Matcher
from engine.logprobs import TokenLogprobs
from engine.request import Request, SamplingParams

VOCAB_SIZE = 50
EOS = 0
BLOCK_SIZE = 4
HASH_SEED = b"tiny model"


class WrongKV(AssertionError):
    """A request was about to be computed on KV that is not its own."""


def kv_of(token_ids: Sequence[int]) -> list[bytes]:
    """The KV of each position of a sequence."""
    values, last = [], b""
    for token_id in token_ids:
        last = blake2b(last + token_id.to_bytes(4, "little"), digest_size=8).digest()
        values.append(last)
    return values


def next_token(values: Sequence[bytes]) -> int:
    """What the model says after a sequence with this KV."""
    return int.from_bytes(blake2b(b"".join(values), digest_size=4).digest(), "little") % VOCAB_SIZE


def logprobs_of(token_id: int) -> TokenLogprobs:
    """What the model says of a token, wherever it stands."""
    return TokenLogprobs(token_id, -token_id / VOCAB_SIZE, rank=token_id + 1)


@dataclass
class FakeKV:
    """The arena: per block, one KV value per position, None where nothing was ever written."""

    num_blocks: int
    block_size: int = BLOCK_SIZE
    blocks: list[list[bytes | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [[None] * self.block_size for _ in range(self.num_blocks)]

    def read(self, block_id: int) -> tuple[bytes | None, ...]:
        return tuple(self.blocks[block_id])

    def write(self, block_id: int, content: Sequence[bytes | None]) -> None:
        self.blocks[block_id] = list(content)


class FakeRunner:
    """Computes batches over a FakeKV, checking what it reads."""

    def __init__(self, kv: FakeKV) -> None:
        self.kv = kv
        self.num_computed: dict[str, int] = {}
        """Tokens computed per request, all tries together."""
        self.batches: list[list[tuple[str, int]]] = []
        """Per step: (request id, tokens)."""
        self.failures: dict[str, str] = {}
        """Requests that no token can be sampled for, and why."""

    def run(self, batch: Batch) -> StepResult:
        self.batches.append([(item.request.request_id, item.num_tokens) for item in batch.scheduled])
        sampled = []
        prompt_logprobs = {}
        for item in batch.scheduled:
            request, end = item.request, item.num_computed + item.num_tokens
            assert item.num_tokens > 0, f"{request.request_id}: nothing to compute"
            assert end <= request.num_tokens, f"{request.request_id}: tokens that do not exist yet"
            values = kv_of(request.token_ids[:end])
            self._check(request, values[: item.num_computed])
            for position in range(item.num_computed, end):
                self._block(request, position)[position % request.block_size] = values[position]
            done = self.num_computed.get(request.request_id, 0)
            self.num_computed[request.request_id] = done + item.num_tokens
            if item.num_prompt_logprobs:
                told = request.token_ids[item.num_computed + 1 : item.num_computed + 1 + item.num_prompt_logprobs]
                prompt_logprobs[request.request_id] = [logprobs_of(token) for token in told]
            if item.samples:
                sampled.append(next_token(values))
        logprobs = {
            item.request.request_id: logprobs_of(token)
            for item, token in zip([item for item in batch.scheduled if item.samples], sampled, strict=True)
            if item.request.sampling.logprobs is not None
        }
        return StepResult(sampled, logprobs, prompt_logprobs, self.failures)

    def _block(self, request: Request, position: int) -> list[bytes | None]:
        return self.kv.blocks[request.block_ids[position // request.block_size]]

    def _check(self, request: Request, expected: Sequence[bytes]) -> None:
        for position, value in enumerate(expected):
            if self._block(request, position)[position % request.block_size] != value:
                raise WrongKV(f"{request.request_id}: position {position} of {len(expected)} computed ones")


_ids = itertools.count()


def make_request(
    prompt: Sequence[int],
    *,
    request_id: str | None = None,
    max_tokens: int = 4,
    ignore_eos: bool = True,
    block_size: int = BLOCK_SIZE,
    hash_seed: bytes = HASH_SEED,
    params=None,
    priority: int = 0,
    arrival_time: float = 0.0,
    matcher: Matcher | None = None,
    **sampling,
) -> Request:
    return Request(
        request_id=request_id or f"r{next(_ids)}",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=ignore_eos,
            extra_args={} if params is None else {"kv_transfer_params": params},
            **sampling,
        ),
        eos_token_ids=frozenset({EOS}),
        block_size=block_size,
        hash_seed=hash_seed,
        arrival_time=arrival_time,
        priority=priority,
        matcher=matcher,
    )


def expected_output(
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    ignore_eos: bool = True,
    stop_token_ids: frozenset[int] = frozenset(),
    max_model_len: int = 10**9,
) -> list[int]:
    """What a cold engine that has nothing else to do answers."""
    tokens = list(prompt)
    while True:
        token = next_token(kv_of(tokens))
        tokens.append(token)
        stopped = token in stop_token_ids or (token == EOS and not ignore_eos)
        if stopped or len(tokens) - len(prompt) >= max_tokens or len(tokens) >= max_model_len:
            return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, 50), k=length)


def prompt_ending_in(token: int, length: int = 6) -> list[int]:
    """A prompt after which the model says `token` first."""
    return next(p for p in (prompt_of(length, seed) for seed in range(5_000)) if expected_output(p)[0] == token)

"""The next token of each row of logits, as its request's sampling parameters want it.

Stateless: a draw depends on the logits, the parameters, the seed and the position alone, so that neither the other rows
of the batch, nor preemption, nor a move to another engine changes it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from engine.masks import next_tokens
from engine.request import Request, SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0."""
HIGHEST_TEMPERATURE = 1e6
"""Above it every token left is as likely as any other, and float32 comes to its end."""
TOP_P_CANDIDATES = 1024
"""Tokens looked at first for top_p; nearly always enough, and far cheaper than sorting the vocabulary."""
LARGEST_LOGIT = 1e30
"""Beyond it a penalty or a temperature could make a logit infinite, and the row's probabilities NaN."""
_NEVER = float("-inf")
NO_TOKEN = -1
"""In place of a token, where a request's parameters leave none."""


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One token, or NO_TOKEN, per row of `logits` [rows, vocab_size] float32, which may be changed in place."""
    stuck = [index for index, request in enumerate(requests) if not prepare(logits[index], request)]
    tokens = choose(logits, requests)
    for index in stuck:
        tokens[index] = NO_TOKEN
    return tokens


def prepare(logits: Tensor, request: Request) -> bool:
    """Adjust a row and rule out what may not come. False, and nothing ruled out, if nothing may."""
    adjust(logits, request)
    mask = next_tokens(request, len(logits))
    if mask is None:
        return True
    if not mask.any():
        return False
    logits.masked_fill_(torch.from_numpy(~mask).to(logits.device), _NEVER)
    return True


def choose(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """The likeliest token of each row, or one drawn."""
    drawn = [index for index, request in enumerate(requests) if request.sampling.temperature >= GREEDY_BELOW]
    if not drawn:
        return likeliest(logits)
    if len(drawn) == len(requests):
        return draw(logits, requests)
    tokens = likeliest(logits)
    draws = draw(logits[drawn], [requests[index] for index in drawn])
    for index, token in zip(drawn, draws, strict=True):
        tokens[index] = token
    return tokens


def likeliest(logits: Tensor) -> list[int]:
    if logits.device.type == "cpu":
        return [int(token) for token in logits.numpy().argmax(-1)]  # ten times as fast as torch's
    return _ints(logits.argmax(-1))


def adjust(logits: Tensor, request: Request) -> None:
    """Bias and penalties: what changes even a greedy choice. In place; logits [vocab]."""
    sampling = request.sampling
    vocab_size = len(logits)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        logits.index_add_(0, _index(ids, logits), torch.tensor(biases, dtype=logits.dtype, device=logits.device))
    if sampling.repetition_penalty != 1.0:
        seen = _index(set(request.token_ids), logits)
        scores, penalty = logits[seen], sampling.repetition_penalty
        scaled = torch.where(scores > 0, scores / penalty, scores * penalty)
        logits[seen] = scaled.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    if (sampling.frequency_penalty or sampling.presence_penalty) and request.num_output_tokens:
        counts = torch.bincount(_index(request.output_token_ids, logits), minlength=vocab_size)
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def draw(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Draw each row's token after temperature, min_p, top_k and top_p. Changes logits in place."""
    temperatures = [[min(request.sampling.temperature, HIGHEST_TEMPERATURE)] for request in requests]
    logits /= torch.tensor(temperatures, device=logits.device)
    for row, request in zip(logits, requests, strict=True):
        restrict(row, request.sampling)
    cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    chances = torch.tensor([[_uniform(request)] for request in requests], dtype=torch.float64, device=logits.device)
    # Below the total, so that the token found is one where the sum grows: never one with probability 0.
    targets = (chances * total).minimum(total.nextafter(torch.zeros_like(total)))
    tokens = _ints(torch.searchsorted(cumulative, targets, right=True).squeeze(-1))
    return [token if token < logits.shape[1] else NO_TOKEN for token in tokens]


def restrict(logits: Tensor, sampling: SamplingParams) -> None:
    """Rule out what min_p, top_k and top_p do not keep, in this order. In place; logits [vocab], temperature applied.

    Tokens as likely as the last one kept are kept too.
    """
    if sampling.min_p > 0.0:
        logits.masked_fill_(logits < logits.max() + math.log(sampling.min_p), _NEVER)
    if 0 < sampling.top_k < len(logits):
        top = logits.topk(sampling.top_k).values
        logits.masked_fill_(logits < top[-1], _NEVER)
    if sampling.top_p < 1.0:
        mass = logits.logsumexp(-1)
        top = logits.topk(min(TOP_P_CANDIDATES, len(logits))).values
        sums = (top - mass).exp().cumsum(-1)
        if sums[-1] < sampling.top_p and len(top) < len(logits):
            top = logits.sort(descending=True).values
            sums = (top - mass).exp().cumsum(-1)
        # A token is kept while those before it do not reach top_p; the likeliest always is.
        num_kept = 1 + int((sums[:-1] < sampling.top_p).sum())
        logits.masked_fill_(logits < top[num_kept - 1], _NEVER)


def _uniform(request: Request) -> float:
    """A number in [0, 1): with a seed, always the same one for the same position in the sequence."""
    seed = request.sampling.seed
    if seed is None:
        return random.random()
    digest = blake2b(f"{seed}:{request.num_tokens}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _index(ids: Sequence[int] | set[int], like: Tensor) -> Tensor:
    return torch.tensor([*ids], dtype=torch.int64, device=like.device)


def _ints(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens.tolist()]

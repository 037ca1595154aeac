"""Which tokens may come next: what a request's grammar, its lists of tokens and words, and its minimum length leave."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.request import Request

Mask = npt.NDArray[np.bool_]


def pack(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """A bitmask of these tokens: bit i % 8 of byte i // 8 is token i."""
    mask = np.zeros(vocab_size, dtype=np.bool_)
    mask[np.fromiter(token_ids, dtype=np.int64)] = True
    return np.packbits(mask, bitorder="little").tobytes()


def next_tokens(request: Request, vocab_size: int) -> Mask | None:
    """One truth value per token, or None if all may come. If none is left, the request cannot go on."""
    sampling, matcher = request.sampling, request.matcher
    too_short = request.num_output_tokens < sampling.min_tokens
    if not (too_short or matcher is not None or sampling.bad_words or sampling.allowed_tokens is not None):
        return None
    mask = None
    stops = [token for token in sampling.stop_token_ids | request.eos_token_ids if token < vocab_size]
    if matcher is not None:
        mask = _unpack(matcher.bitmask(), vocab_size)
        if matcher.failure is not None:
            return np.zeros(vocab_size, dtype=np.bool_)
        if matcher.may_end:
            mask[stops] = True
    if sampling.allowed_tokens is not None:
        allowed = _unpack(sampling.allowed_tokens, vocab_size)
        mask = allowed if mask is None else mask & allowed
    if words := [ids[-1] for ids in sampling.bad_words if _ends_with(request, ids[:-1])]:
        mask = _all(vocab_size) if mask is None else mask
        mask[words] = False
    if stops and too_short:
        mask = _all(vocab_size) if mask is None else mask
        longer = mask.copy()
        longer[stops] = False
        if longer.any():  # if every token left is a stop token, one of them it must be
            mask = longer
    return mask


def _ends_with(request: Request, ids: tuple[int, ...]) -> bool:
    """Whether these are the last tokens of the output."""
    first = request.num_tokens - len(ids)
    return first >= request.num_prompt_tokens and tuple(request.token_ids[first:]) == ids


def _unpack(bitmask: bytes, vocab_size: int) -> Mask:
    bits = np.frombuffer(bitmask, dtype=np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


def _all(vocab_size: int) -> Mask:
    return np.ones(vocab_size, dtype=np.bool_)

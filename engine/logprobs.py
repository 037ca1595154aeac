"""How likely tokens were, as requests ask to be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token at its position. Natural logarithms of the model's own probabilities (softmax of the raw logits),
    before bias, penalties and temperature."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of its position."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their logprobs, best first; as many as were asked for."""

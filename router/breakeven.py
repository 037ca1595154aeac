"""From how many new tokens on a prefill leg pays: measured, since it depends on machine, model and network.

A prefill leg costs a fixed part (two exchanges, queueing, shipping the KV) and a part for each token it computes. Where
the decode engine has everything but the last few tokens, computing those itself costs only the second part, and holds
up what it is decoding for as long. So up to (fixed part / part per token) tokens the decode engine is left alone.

The two parts are the line through the prefill legs seen so far, by least squares with older ones fading (recursive
least squares with a forgetting factor; Haykin, Adaptive Filter Theory, ch. 10).
"""

from __future__ import annotations

from typing import Final

FADING: Final = 0.98
LEAST_SAMPLES: Final = 8.0
UNMEASURED: Final = 32
"""Until enough legs were seen: two blocks."""
MOST: Final = 512
"""Beyond, a decode engine would stall visibly, whatever was measured."""


class BreakEven:
    def __init__(self, fixed: int | None = None) -> None:
        """`fixed`: a number of tokens from the settings, in place of measuring."""
        self._fixed = fixed
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_computed: int, seconds: float) -> None:
        """One prefill leg: how many tokens it computed and how long it took."""
        self._n = FADING * self._n + 1.0
        self._x = FADING * self._x + num_computed
        self._y = FADING * self._y + seconds
        self._xx = FADING * self._xx + num_computed * num_computed
        self._xy = FADING * self._xy + num_computed * seconds

    @property
    def tokens(self) -> int:
        """The most new tokens a decode engine should compute by itself."""
        if self._fixed is not None:
            return self._fixed
        spread = self._n * self._xx - self._x * self._x
        if self._n < LEAST_SAMPLES or spread <= 0.0:
            return UNMEASURED
        per_token = (self._n * self._xy - self._x * self._y) / spread
        fixed_part = (self._y - per_token * self._x) / self._n
        if per_token <= 0.0 or fixed_part <= 0.0:
            return UNMEASURED  # noise: longer prompts did not take longer
        return min(MOST, int(fixed_part / per_token))

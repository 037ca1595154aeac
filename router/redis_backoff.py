"""How long to leave alone what has just failed."""

from __future__ import annotations

import random
from typing import Final

FIRST_SECONDS: Final = 0.05
MAX_SECONDS: Final = 1.0
CALM_SECONDS: Final = 4.0
"""Failures further apart have nothing to do with each other."""


class Backoff:
    """Not at all after a first failure, then longer after each, up to a second; never quite as long as another
    router does."""

    def __init__(self) -> None:
        self.until = 0.0
        self._num = 0
        self._last = -CALM_SECONDS

    def failed(self, now: float) -> None:
        self._num = self._num + 1 if now - self._last < CALM_SECONDS else 1
        self._last = now
        if self._num > 1:
            longest = min(MAX_SECONDS, FIRST_SECONDS * 2.0 ** min(self._num - 2, 10))
            self.until = now + longest * random.uniform(0.5, 1.0)

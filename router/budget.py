"""How often turns may be tried again: a share of all turns, so that retries never become the storm they answer to."""

from __future__ import annotations

import asyncio
from typing import Final

LEAST_PER_SECOND: Final = 1.0
"""Retries that are always possible, however few turns there are."""
MOST_SAVED: Final = 100.0
FIRST: Final = 20.0
ROUNDING: Final = 1e-6


class RetryBudget:
    """Every turn puts a share of a retry in, every retry takes one out (Finagle's retry budget is the model)."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = FIRST
        self._time = asyncio.get_running_loop().time
        self._seen_at = self._time()

    def deposit(self) -> None:
        """A turn begins."""
        if self._saved < MOST_SAVED:
            self._saved += self._share

    def spend(self) -> bool:
        """Whether a turn may be tried once more."""
        now = self._time()
        self._saved = min(self._saved + LEAST_PER_SECOND * (now - self._seen_at), MOST_SAVED)
        self._seen_at = now
        if self._saved < 1.0 - ROUNDING:
            return False
        self._saved -= 1.0
        return True

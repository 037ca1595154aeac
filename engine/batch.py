"""What one engine step computes, as the scheduler hands it to the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The tokens [num_computed, num_computed + num_tokens) of a request; its block_ids cover them."""

    request: Request
    num_computed: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """True if this step reaches the request's last known token, so that the next one is sampled."""
        return self.num_computed + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    scheduled: Sequence[ScheduledRequest]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)

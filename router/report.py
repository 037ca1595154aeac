"""How a turn went: gathered on the way; one log line, the metrics and X-Backhaul-Explain come from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from router.metrics import Metrics

Outcome = Literal["ok", "rejected", "failed", "cut", "client_gone"]

_LOGGED: Final = (
    *("request_id", "endpoint", "model", "outcome", "status", "turn", "reason", "attempts", "prefill", "decode"),
    *("handoff", "prompt_tokens", "cached_tokens", "completion_tokens"),
)

log = logging.getLogger("router.turn")


@dataclass(slots=True)
class Report:
    request_id: str
    endpoint: str
    model: str | None = None
    """Set once we know that it is one: what clients make up is not logged."""
    turn: int = 1
    """Which turn of its conversation this is, as far as we remember."""
    prefill: str | None = None
    decode: str | None = None
    reason: str | None = None
    attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens the prefill engine had in its own cache."""
    completion_tokens: int | None = None
    handoff: bool = False
    """Whether the decode engine was given blocks to pull."""
    started: float = field(default_factory=time.monotonic)
    first_byte: float | None = None
    """Seconds until the first piece of a stream."""
    status: int = 200
    outcome: Outcome = "failed"

    def see_first_byte(self) -> None:
        if self.first_byte is None:
            self.first_byte = time.monotonic() - self.started

    def see_usage(self, usage: Mapping[str, Any], prompt_ids: int, output_ids: int) -> None:
        """Take the engine's own counts where it gives them, else those of the ids seen."""
        self.prompt_tokens = _count(usage.get("prompt_tokens"), prompt_ids or self.prompt_tokens)
        self.completion_tokens = _count(usage.get("completion_tokens"), output_ids or None)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, Mapping):
            self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)

    def explain(self) -> str:
        """What X-Backhaul-Explain answers: one line of JSON."""
        return orjson.dumps(
            {
                "prefill": self.prefill,
                "decode": self.decode,
                "reason": self.reason,
                "attempts": self.attempts,
                "turn": self.turn,
                "handoff": self.handoff,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
            }
        ).decode()

    def settle(self, metrics: Metrics) -> None:
        """Count the turn and log its line. Nothing in it comes from the prompt or the answer."""
        seconds = time.monotonic() - self.started
        metrics.turns.labels(self.endpoint, self.outcome).inc()
        metrics.turn_seconds.labels(self.endpoint).observe(seconds)
        if self.first_byte is not None:
            metrics.first_byte_seconds.labels(self.endpoint).observe(self.first_byte)
        for kind in ("prompt", "cached", "completion"):
            metrics.tokens.labels(kind).inc(getattr(self, f"{kind}_tokens") or 0)
        fields = {name: getattr(self, name) for name in _LOGGED}
        fields["first_byte_ms"] = None if self.first_byte is None else round(1000 * self.first_byte, 1)
        fields["ms"] = round(1000 * seconds, 1)
        log.info("turn", extra={name: value for name, value in fields.items() if value is not None})


def _count(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and value >= 0 else otherwise

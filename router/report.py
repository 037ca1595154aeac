"""How a turn went: gathered on the way; one log line, the metrics and X-Backhaul-Explain come from it."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final, Literal

from router.answer import Seen
from router.api.legs import Prefilled
from router.metrics import TOKEN_KINDS, Metrics
from router.phases import Phase, Span
from router.statement import without_user

Outcome = Literal["ok", "rejected", "failed", "cut", "client_gone"]

_LOGGED: Final = (
    *("request_id", "endpoint", "model", "outcome", "status", "turn", "reason", "attempts", "prefill", "decode"),
    *("kv", "handoff", "prompt_tokens", "cached_tokens", "pulled_tokens", "computed_tokens", "completion_tokens"),
    *("trace_id", "media", "media_known", "media_encoded", "media_local", "encoders", "encode_fallback"),
)
_logged: Final = attrgetter(*_LOGGED)
_tokens: Final = attrgetter(*(f"{kind}_tokens" for kind in TOKEN_KINDS))

log = logging.getLogger("router.turn")


_blank: Final = vars(logging.LogRecord(log.name, logging.INFO, "", 0, "", (), None))


def _record(message: str, fields: Mapping[str, object]) -> logging.LogRecord:
    """What `log.info(message, extra=fields)` would make, without finding out anew what is the same for all."""
    record = logging.LogRecord.__new__(logging.LogRecord)
    now = time.time()
    record.__dict__ = {**_blank, **fields, "fields": fields, "msg": message, "created": now, "msecs": now % 1 * 1000}
    return record


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
    """Of the plan, for the choice of engines."""
    kv: str | None = None
    """Of the plan, for what became of the last turn's KV."""
    attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the engine which prefilled had in its own cache."""
    pulled_tokens: int | None = None
    """Prompt tokens whose KV the prefill engine pulled from the last turn's decode engine."""
    completion_tokens: int | None = None
    media: int | None = None
    """Pictures and the like in the messages, each once; where there are encoders."""
    media_known: int | None = None
    """Those whose KV was there, as far as could be told."""
    media_encoded: int | None = None
    """Those that encoders have encoded, in the last attempt."""
    media_local: int | None = None
    """Those left to the engine that prefills."""
    encoders: str | None = None
    """Who was asked."""
    encode_fallback: str | None = None
    """Why media were left."""
    handoff: bool = False
    """Whether the decode engine was given blocks to pull."""
    started: float = field(default_factory=time.monotonic)
    first_byte: float | None = None
    """Seconds until the first piece of a stream."""
    status: int = 200
    outcome: Outcome = "failed"
    phase: Phase | None = "read"
    """What the turn is doing."""
    entered: float = 0.0
    """When it began to; no time before `started`."""
    phases: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    """Seconds it took, without the one it is in."""
    span: Span | None = None
    """Of the turn's trace, if there is one."""
    trace_id: str | None = None

    def __post_init__(self) -> None:
        self.entered = self.started

    def enter(self, phase: Phase | None) -> None:
        """The turn goes on to this; what it did until now is over. A phase may come again, and adds up."""
        now = time.monotonic()
        if (last := self.phase) is not None:
            self.phases[last] += now - self.entered
        self.phase, self.entered = phase, now
        if self.span is not None:
            self.span.enter(phase)

    def onto(self, headers: str, engine: str) -> str:
        """The headers of a leg to an engine, with what makes that one's spans part of the turn's trace."""
        return headers if self.span is None else headers + self.span.context(engine)

    def see_first_byte(self) -> None:
        if self.first_byte is None:
            self.first_byte = time.monotonic() - self.started

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that had to be computed."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return max(0, self.prompt_tokens - self.cached_tokens - (self.pulled_tokens or 0))

    def restart(self) -> None:
        """Another attempt: what the last one had counted is not part of the answer."""
        self.prompt_tokens = self.cached_tokens = self.pulled_tokens = None

    def see_prefill(self, prefilled: Prefilled) -> int | None:
        """A prefill leg's answer; returns how many tokens it computed, if it says so."""
        ids = prefilled.prompt_token_ids
        self.prompt_tokens = None if ids is None else len(ids.numbers)
        if prefilled.params is not None:
            self.cached_tokens = prefilled.params.remote_prefill_cached_tokens
            self.pulled_tokens = prefilled.params.remote_prefill_pulled_tokens
        return self.computed_tokens

    def see_media(self, count: int, *, known: int) -> None:
        """Another attempt to have them encoded."""
        self.media, self.media_known = count, known or None
        self.media_encoded = self.media_local = self.encoders = self.encode_fallback = None

    def see_encoder(self, name: str) -> None:
        self.encoders = ", ".join(dict.fromkeys([*(self.encoders.split(", ") if self.encoders else ()), name]))

    def see_local(self, why: str, count: int) -> None:
        self.media_local, self.encode_fallback = (self.media_local or 0) + count, why

    def see_start(self, seen: Seen) -> None:
        """The first piece of a stream; for a turn without a prefill leg it tells what that would have told."""
        self.see_first_byte()
        if self.prompt_tokens is None and (ids := seen.prompt_token_ids) is not None:
            self.prompt_tokens = len(ids.numbers)
        if not self.handoff and seen.num_cached_tokens is not None:
            self.cached_tokens = seen.num_cached_tokens

    def see_usage(self, seen: Seen) -> None:
        """Take the engine's own counts where it gives them, else those of the ids seen."""
        usage, ids = seen.usage, seen.prompt_token_ids
        known = self.prompt_tokens if ids is None else len(ids.numbers)
        self.prompt_tokens = known if usage.prompt is None else usage.prompt
        self.completion_tokens = usage.completion
        if usage.completion is None and seen.output_token_ids:
            self.completion_tokens = len(seen.output_token_ids)
        # After a prefill leg this count includes what was pulled, which we know better.
        if self.cached_tokens is None:
            self.cached_tokens = usage.cached

    def explain(self) -> dict[str, str]:
        """The headers that X-Backhaul-Explain asks for."""
        told = {
            "Plan": None if self.reason is None else f"{self.reason}; kv={self.kv}",
            "Prefill": self.prefill and without_user(self.prefill),
            "Decode": self.decode and without_user(self.decode),
            "Media": self._media(),
            "Encode": self.encoders,
            "Turn": self.turn,
            "Attempts": self.attempts,
            "Prompt-Tokens": self.prompt_tokens,
            "Tokens-Reused": self.cached_tokens,
            "Tokens-Pulled": self.pulled_tokens,
            "Tokens-Computed": self.computed_tokens,
        }
        explained = {f"X-Backhaul-{name}": str(value) for name, value in told.items() if value is not None}
        return explained | {"Server-Timing": self.server_timing()}

    def _media(self) -> str | None:
        if self.media is None:
            return None
        told = {"encoded": self.media_encoded, "known": self.media_known, "local": self.media_local}
        why = f" ({self.encode_fallback})" if self.encode_fallback else ""
        return "; ".join([str(self.media), *(f"{name}={count}" for name, count in told.items() if count)]) + why

    def server_timing(self) -> str:
        """Milliseconds by phase, for browsers' developer tools among others; of a stream, until its first piece."""
        now = time.monotonic()
        phases = dict(self.phases)
        if self.phase is not None:
            phases[self.phase] = phases.get(self.phase, 0.0) + now - self.entered
        phases["total"] = now - self.started
        return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in phases.items())

    def settle(self, metrics: Metrics) -> float:
        """Count the turn and log its line. Nothing in it comes from the prompt or the answer. Returns the seconds it
        took."""
        self.enter(None)
        seconds = self.entered - self.started
        metrics.turns.add(self.endpoint, self.outcome)
        metrics.turn_seconds.observe(self.endpoint, seconds)
        for phase, spent in self.phases.items():
            metrics.phase_seconds.observe(phase, spent)
        if self.first_byte is not None:
            metrics.first_byte_seconds.observe(metrics.model(self.model or ""), self.first_byte)
        for kind, count in zip(TOKEN_KINDS, _tokens(self), strict=True):
            if count:
                metrics.tokens.add(kind, by=count)
        if log.isEnabledFor(logging.INFO):
            told = zip(_LOGGED, _logged(self), strict=True)
            fields = {name: value for name, value in told if value is not None}
            for role in ("prefill", "decode"):
                if "@" in fields.get(role, ""):
                    fields[role] = without_user(fields[role])
            if self.first_byte is not None:
                fields["first_byte_ms"] = round(1000 * self.first_byte, 1)
            fields["ms"] = round(1000 * seconds, 1)
            if logging.getLogRecordFactory() is logging.LogRecord:
                log.handle(_record("turn", fields))
            else:
                log.info("turn", extra=fields)
        return seconds

"""Which engines serve a turn, and why: a pure function of the request, the record and the view of the pools."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from connectors.wire.openai import APIError, model_not_found, unavailable


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as the plan sees it."""

    url: str
    ready: bool
    models: frozenset[str]
    """Those it listed last, also if it is down now."""
    in_flight: int = 0
    """Requests of ours it is working on."""
    dispatched: int = 0
    """Requests it was ever given; evens out who gets the next one when all are idle."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the plan needs to know about a turn."""

    model: str
    alone: str | None = None
    """Why the decode engine must prefill for itself, if it must."""
    last_prefill: str | None = None
    """Engine URLs of the conversation's last turn: their prefix caches know it."""
    last_decode: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    prefill: str | None
    """Engine URL; None: the decode engine prefills for itself."""
    decode: str
    reason: str
    """For the metrics, the log and X-Backhaul-Explain: one of a small fixed set."""


def make_plan(
    facts: Facts,
    prefill: Sequence[EngineView],
    decode: Sequence[EngineView],
    *,
    avoid: Set[str] = frozenset(),
    slack: int = 4,
    fallback: bool = False,
) -> Plan:
    """Choose the engines. `avoid` are those that just failed this turn.

    Raises APIError: 404 for a model no engine lists, 503 if those that list it are not ready, or none could say yet.
    """
    _check_model(facts.model, prefill, decode)
    decoder = _choose(decode, facts.model, facts.last_decode, avoid, slack)
    if decoder is None:
        raise _nobody("decode", facts.model)
    if facts.alone is not None:
        return Plan(None, decoder.url, facts.alone)
    if not prefill:
        return Plan(None, decoder.url, "no_prefill_pool")
    prefiller = _choose(prefill, facts.model, facts.last_prefill, avoid, slack)
    if prefiller is None:
        if fallback:
            return Plan(None, decoder.url, "no_prefill_engine")
        raise _nobody("prefill", facts.model)
    if facts.last_decode is None:
        return Plan(prefiller.url, decoder.url, "new")
    stays = decoder.url == facts.last_decode
    return Plan(prefiller.url, decoder.url, "affinity" if stays else "moved")


def _choose(pool: Sequence[EngineView], model: str, last: str | None, avoid: Set[str], slack: int) -> EngineView | None:
    able = [engine for engine in pool if engine.ready and model in engine.models and engine.url not in avoid]
    if not able:
        return None
    idlest = min(able, key=lambda engine: (engine.in_flight, engine.dispatched))
    own = next((engine for engine in able if engine.url == last), None)
    return own if own is not None and own.in_flight <= idlest.in_flight + slack else idlest


def _check_model(model: str, prefill: Sequence[EngineView], decode: Sequence[EngineView]) -> None:
    if any(model in engine.models for engine in (*prefill, *decode)):
        return
    if not any(engine.models for engine in decode):  # what prefill engines list says nothing of what will be served
        raise unavailable("No engine is ready yet. Try again in a moment.")
    raise model_not_found(model)


def _nobody(role: str, model: str) -> APIError:
    return unavailable(f"No {role} engine is ready for `{model}` now. Try again in a moment.")

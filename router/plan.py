"""Which engines serve a turn, and why: a pure function of the request, the record and the view of the pools."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, get_args

from connectors.wire.openai import APIError, model_not_found, unavailable
from router.verify import Why


class EngineView(NamedTuple):
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
    num_new: int | None = None
    """Prompt tokens beyond those that the last decode engine has; None if that is not known for certain."""
    why: Why = "no_record"
    """What became of that engine's blocks."""
    refuses: bool = False
    """Whether that engine refuses a prompt that its cache has lost, rather than compute all of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    prefill: str | None
    """Engine URL; None: the decode engine prefills for itself."""
    decode: str
    reason: str
    """Why these engines. For the metrics, the log and the explanation: one of REASONS."""
    kv: str
    """What the last turn's KV is used for, or why not: one of KV_REASONS."""
    pull: bool = False
    """Whether the prefill engine is given the last turn's blocks."""


REASONS: Final = (
    *("new", "affinity", "spill", "moved", "short_suffix", "no_prefill_pool", "no_prefill_engine"),
    *("several_choices", "several_prompts", "beam_search", "prompt_logprobs", "prompt_embeds", "stored_state"),
)
"""
new                 nothing is known of the conversation: the least loaded engines
affinity            the decode engine of the last turn again
spill               not that one, it has too much to do
moved               not that one, it is not there
short_suffix        that one alone: what is new is computed sooner than shipped
no_prefill_pool     there are no prefill engines
no_prefill_engine   none of them is ready, and the settings let decode engines step in
the others          KV of such a request cannot be handed over: the decode engine prefills
"""
KV_REASONS: Final = ("own_cache", "not_used", *get_args(Why))
"""own_cache: the decode engine goes on from its prefix cache; not_used: a request of the kind that cannot use any."""


def make_plan(
    facts: Facts,
    prefill: Sequence[EngineView],
    decode: Sequence[EngineView],
    *,
    avoid: Set[str] = frozenset(),
    slack: int = 4,
    fallback: bool = False,
    break_even: int = 0,
) -> Plan:
    """Choose the engines, and whether the last turn's KV goes to the prefill engine.

    `avoid` are those that just failed this turn. Up to `break_even` new tokens the decode engine computes by itself.

    Raises APIError: 404 for a model no engine lists, 503 if those that list it are not ready, or none could say yet.
    """
    _check_model(facts.model, prefill, decode)
    decoder = _choose(decode, facts.model, facts.last_decode, avoid, slack)
    if decoder is None:
        raise _nobody("decode", facts.model)
    if facts.alone is not None:
        return Plan(None, decoder.url, facts.alone, "not_used")
    if not prefill:
        return Plan(None, decoder.url, "no_prefill_pool", "own_cache")
    stays = decoder.url == facts.last_decode
    offered = facts.why in ("offered", "self_checked")
    if (
        stays
        and facts.refuses
        and facts.why in ("offered", "short")
        and facts.num_new is not None
        and facts.num_new <= break_even
    ):
        return Plan(None, decoder.url, "short_suffix", "own_cache")
    prefiller = _choose(prefill, facts.model, facts.last_prefill, avoid, slack)
    if prefiller is None:
        if fallback:
            return Plan(None, decoder.url, "no_prefill_engine", "own_cache")
        raise _nobody("prefill", facts.model)
    owner_up = any(engine.url == facts.last_decode and engine.ready for engine in decode if engine.url not in avoid)
    why: Why = "owner_down" if offered and not owner_up else facts.why
    if facts.last_decode is None:
        reason = "new"
    elif stays:
        reason = "affinity"
    else:
        reason = "spill" if owner_up else "moved"
    return Plan(prefiller.url, decoder.url, reason, why, pull=offered and owner_up)


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

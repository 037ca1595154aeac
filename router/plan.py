"""Which engines serve a turn, and why: a pure function of the request, the record and the view of the pools."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from connectors.wire.openai import APIError, model_not_found, unavailable
from router.capabilities import UNKNOWN, Capabilities, mismatch
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
    known: Capabilities = UNKNOWN
    pulls: bool = True
    """Whether it may be given blocks to pull."""


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
    scale_out: bool = False
    """Whether it is token ids in, token ids out, which not every engine serves."""
    refuses: bool = False
    """Whether that engine refuses a prompt that its cache has lost, rather than compute all of it."""


class Lack(NamedTuple):
    """What a turn must do without, and why. Labels of the metrics."""

    what: Literal["handoff", "pull"]
    why: str
    """A Mismatch; or scale_out, one_way, on_trial."""


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
    lack: Lack | None = None
    """What the turn must do without, for what engines cannot do."""


REASONS: Final = (
    *("new", "affinity", "spill", "moved", "short_suffix", "no_prefill_pool", "no_prefill_engine"),
    "no_compatible_prefill",
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
no_compatible_prefill  those that are ready compute KV that no decode engine can use
the others          KV of such a request cannot be handed over: the decode engine prefills
"""
KV_REASONS: Final = ("own_cache", "not_used", *get_args(Why))
"""own_cache: the decode engine goes on from its prefix cache; not_used: a request of the kind that cannot use any."""

OFFERED: Final[tuple[Why, ...]] = ("offered", "self_checked")


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
    decoders = _able(decode, facts.model, avoid)
    if not decoders:
        raise _nobody("decode", facts.model)
    if facts.scale_out:
        decoders = [one for one in decoders if one.known.scale_out is not False] or decoders
    decoder = _choose(decoders, facts.last_decode, slack)
    if facts.alone is not None:
        return Plan(None, decoder.url, facts.alone, "not_used")
    if not prefill:
        return Plan(None, decoder.url, "no_prefill_pool", "own_cache")
    if (
        decoder.url == facts.last_decode
        and facts.refuses
        and facts.why in ("offered", "short")
        and facts.num_new is not None
        and facts.num_new <= break_even
    ):
        return Plan(None, decoder.url, "short_suffix", "own_cache")
    ready = _able(prefill, facts.model, avoid)
    decoder, prefillers = _pair(decoder, decoders, ready, facts, slack)
    if not prefillers:
        listing = [engine for engine in prefill if facts.model in engine.models]
        if ready and not any(_partners(one, listing, facts) for one in decoders):
            lack = Lack("handoff", _obstacle(decoder, ready[0], facts) or "kind")
            return Plan(None, decoder.url, "no_compatible_prefill", "own_cache", lack=lack)
        if fallback:
            return Plan(None, decoder.url, "no_prefill_engine", "own_cache")
        raise _nobody("prefill", facts.model)
    prefiller = _choose(prefillers, facts.last_prefill, slack)
    owner = next((one for one in decode if one.url == facts.last_decode and one.url not in avoid), None)
    kv, lack_of_pull = _pull(facts, prefiller, owner)
    if facts.last_decode is None:
        reason = "new"
    elif decoder.url == facts.last_decode:
        reason = "affinity"
    else:
        reason = "spill" if owner is not None and owner.ready else "moved"
    return Plan(prefiller.url, decoder.url, reason, kv, pull=kv in OFFERED, lack=lack_of_pull)


def _pair(
    decoder: EngineView, decoders: Sequence[EngineView], ready: Sequence[EngineView], facts: Facts, slack: int
) -> tuple[EngineView, list[EngineView]]:
    """The decode engine and the prefill engines that can compute for it; another decode engine if it has none."""
    partners = _partners(decoder, ready, facts)
    if not partners and (paired := [one for one in decoders if _partners(one, ready, facts)]):
        decoder = _choose(paired, facts.last_decode, slack)
        partners = _partners(decoder, ready, facts)
    return decoder, partners


def _pull(facts: Facts, prefiller: EngineView, owner: EngineView | None) -> tuple[Why, Lack | None]:
    """What becomes of the blocks that the last turn's decode engine offers."""
    if facts.why not in OFFERED:
        return facts.why, None
    if owner is None or not owner.ready:
        return "owner_down", None
    if (obstacle := mismatch(prefiller.known, owner.known)) is not None:
        return "incompatible", Lack("pull", obstacle)
    if not prefiller.pulls:
        return "one_way", Lack("pull", "one_way" if prefiller.known.bidirectional is False else "on_trial")
    return facts.why, None


def _able(pool: Sequence[EngineView], model: str, avoid: Set[str]) -> list[EngineView]:
    return [engine for engine in pool if engine.ready and model in engine.models and engine.url not in avoid]


def _partners(decoder: EngineView, prefill: Sequence[EngineView], facts: Facts) -> list[EngineView]:
    """Those whose KV the decode engine can use."""
    return [engine for engine in prefill if _obstacle(decoder, engine, facts) is None]


def _obstacle(decoder: EngineView, prefiller: EngineView, facts: Facts) -> str | None:
    if facts.scale_out and prefiller.known.scale_out is False:
        return "scale_out"
    return mismatch(prefiller.known, decoder.known)


def _choose(able: Sequence[EngineView], last: str | None, slack: int) -> EngineView:
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

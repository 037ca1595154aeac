"""Which engines serve a turn, and why: a pure function of the request, the record and the view of the pools."""

from __future__ import annotations

import random
from collections.abc import Container, Set
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple, TypeVar, get_args

from connectors.wire.openai import APIError, model_not_found, unavailable
from router.capabilities import Capabilities, mismatch
from router.choose import choose
from router.member import Role
from router.roster import Able, Candidate, Roster
from router.verify import Why

C = TypeVar("C", bound=Candidate)


class NoEngine(APIError):
    """503: none of the engines of a pool that list the model is in rotation."""

    def __init__(self, role: Role, message: str) -> None:
        like = unavailable(message)
        super().__init__(like.status, message, type=like.type, headers=like.headers)
        self.role = role


# Like all that each turn makes not frozen, though nobody changes it: that would cost a call for each field.
@dataclass(slots=True)
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
    owner: str | None = None
    """The id that engine had when it offered them."""
    prefix: bytes | None = None
    """A digest of how the prompt begins, if others may begin so too."""
    scale_out: bool = False
    """Whether it is token ids in, token ids out, which not every engine serves."""
    refuses: bool = False
    """Whether that engine refuses a prompt that its cache has lost, rather than compute all of it."""


class Lack(NamedTuple):
    """What a turn must do without, and why. Labels of the metrics."""

    what: Literal["handoff", "pull"]
    why: str
    """A Mismatch; or scale_out, one_way, on_trial."""


@dataclass(slots=True)
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
    prefill: Roster[C],
    decode: Roster[C],
    *,
    draw: random.Random,
    avoid: Set[str] = frozenset(),
    slack: float = 4,
    has_prefill: bool = True,
    fallback: bool = False,
    break_even: int = 0,
    served: Container[str] = frozenset(),
) -> Plan:
    """Choose the engines, and whether the last turn's KV goes to the prefill engine.

    `avoid` are those that just failed this turn. `has_prefill`: whether there is a prefill pool, be it empty now. Up to
    `break_even` new tokens the decode engine computes by itself. `served` are models of engines that have left.

    Raises APIError: 404 for a model no engine lists, 503 if those that list it are not ready, or none could say yet.
    """
    pick = partial(choose, slack=slack, prefix=facts.prefix, draw=draw)
    _check_model(facts.model, prefill, decode, served)
    decoders = decode.able(facts.model, avoid)
    if not decoders:
        raise _nobody("decode", facts.model)
    if facts.scale_out:
        decoders = decoders.that(lambda can: can.scale_out is not False) or decoders
    decoder = pick(decoders, facts.last_decode)
    if facts.alone is not None:
        return Plan(None, decoder.url, facts.alone, "not_used")
    if not has_prefill:
        return Plan(None, decoder.url, "no_prefill_pool", "own_cache")
    if (
        decoder.url == facts.last_decode
        and facts.refuses
        and facts.why in ("offered", "short")
        and facts.num_new is not None
        and facts.num_new <= break_even
    ):
        return Plan(None, decoder.url, "short_suffix", "own_cache")
    ready = prefill.able(facts.model, avoid)
    prefillers = _partners(decoder.can, ready, facts)
    if not prefillers:
        paired = decoders.that(lambda can: bool(_partners(can, ready, facts)))
        if not paired:
            return _without_prefill(facts, decoder, decoders, prefill, ready, fallback=fallback)
        decoder = pick(paired, facts.last_decode)
        prefillers = _partners(decoder.can, ready, facts)
    prefiller = pick(prefillers, facts.last_prefill)
    owner = decode.find(facts.last_decode) if facts.last_decode not in avoid else None
    kv, lack_of_pull = _pull(facts, prefiller, owner)
    if facts.last_decode is None:
        reason = "new"
    elif decoder.url == facts.last_decode:
        reason = "affinity"
    else:
        reason = "spill" if owner is not None and owner.ready and not owner.spared else "moved"
    return Plan(prefiller.url, decoder.url, reason, kv, pull=kv in OFFERED, lack=lack_of_pull)


def _without_prefill(
    facts: Facts, decoder: C, decoders: Able[C], prefill: Roster[C], ready: Able[C], *, fallback: bool
) -> Plan:
    """No prefill engine that is ready can compute for any of the decode engines."""
    if ready:
        listing = [group.can for group in prefill.listing(facts.model)]
        if not any(_obstacle(can, other, facts) is None for can in decoders.kinds() for other in listing):
            lack = Lack("handoff", _obstacle(decoder.can, next(iter(ready)).can, facts) or "kind")
            return Plan(None, decoder.url, "no_compatible_prefill", "own_cache", lack=lack)
    if fallback:
        return Plan(None, decoder.url, "no_prefill_engine", "own_cache")
    raise _nobody("prefill", facts.model)


def _pull(facts: Facts, prefiller: Candidate, owner: Candidate | None) -> tuple[Why, Lack | None]:
    """What becomes of the blocks that the last turn's decode engine offers."""
    if facts.why not in OFFERED:
        return facts.why, None
    if owner is None or not owner.readable:
        return "owner_down", None
    if not owner.has(facts.owner):
        return "owner_restarted", None
    if (obstacle := mismatch(prefiller.can, owner.can)) is not None:
        return "incompatible", Lack("pull", obstacle)
    if not prefiller.pulls:
        return "one_way", Lack("pull", "one_way" if prefiller.can.bidirectional is False else "on_trial")
    return facts.why, None


def _partners(decoder: Capabilities, prefill: Able[C], facts: Facts) -> Able[C]:
    """Those whose KV the decode engine can use."""
    return prefill.that(lambda can: _obstacle(decoder, can, facts) is None)


def _obstacle(decoder: Capabilities, prefiller: Capabilities, facts: Facts) -> str | None:
    if facts.scale_out and prefiller.scale_out is False:
        return "scale_out"
    return mismatch(prefiller, decoder)


def _check_model(model: str, prefill: Roster[C], decode: Roster[C], served: Container[str]) -> None:
    if decode.lists(model) or prefill.lists(model):
        return
    if model in served:
        raise _nobody("decode", model)
    if not decode.lists_any:  # what prefill engines list says nothing of what will be served
        raise unavailable("No engine is ready yet. Try again in a moment.")
    raise model_not_found(model)


def _nobody(role: Role, model: str) -> NoEngine:
    return NoEngine(role, f"No {role} engine is ready for `{model}` now. Try again in a moment.")

"""What an engine can do, who may exchange KV with whom, and what it costs a turn that something is missing.

Engines have no way to list what they can do, so each fact is known in one of three ways: *stated* by the operator,
*seen* in what the engine answers, or *assumed* from its kind and version. Nobody is refused for a fact that is not
known: a turn then does less.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple

Kind = Literal["backhaul", "vllm"]
Source = Literal["stated", "seen", "assumed"]
Flag = Literal[
    "bidirectional",
    "streams_carry_params",
    "tokenize",
    "scale_out",
    "return_token_ids",
    "release",
    "token_note",
    "seal",
]
Mismatch = Literal["kind", "version", "block_size", "cache_dtype", "kv_layout"]

OURS: Final = "backhaul"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """None: not known."""

    kind: Kind | None = None
    """Whose engine it is."""
    version: str | None = None
    engine_id: str | None = None
    """Its name for itself, new with every start; our engines tell it when asked, others with the blocks they hold."""
    block_size: int | None = None
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks it has altogether."""
    cache_dtype: str | None = None
    """How it stores KV, in its own words."""
    kv_layout: str | None = None
    """Fingerprint of model, dtype and block layout; only ours have one."""
    bidirectional: bool | None = None
    """For decode: offers its blocks to the next turn. For prefill: may be given such an offer. A vLLM that was started
    without it waits for ever for what it was given."""
    streams_carry_params: bool | None = None
    """Whether the end of a stream has the offer; see `stream_carries`."""
    tokenize: bool | None = None
    """Whether there is /tokenize."""
    scale_out: bool | None = None
    """Whether token ids in, token ids out is served: generate, render, derender."""
    return_token_ids: bool | None = None
    """Whether it tells the ids of prompts and answers when asked."""
    release: bool | None = None
    """Whether blocks can be given back that nobody will read."""
    token_note: bool | None = None
    """Whether it tells the ids once, at the end, instead of in every event."""
    seal: bool | None = None
    """Whether it can be made to take transfer params from the router only."""
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)
    """How each of them is known."""

    def stream_carries(self, endpoint: str) -> bool | None:
        """Whether the end of a stream of this endpoint (by its name in the metrics) has the decode engine's offer."""
        return False if self.kind == "vllm" and endpoint == "generate" else self.streams_carry_params


FACTS: Final = tuple(one.name for one in fields(Capabilities) if one.name != "sources")
UNKNOWN: Final = Capabilities()


def merged(*layers: tuple[Source, Capabilities]) -> Capabilities:
    """What is known altogether: of each fact, what the first layer says that knows it."""
    known: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name in FACTS:
        for source, layer in layers:
            value = getattr(layer, name)
            if value is not None:
                known[name], sources[name] = value, source
                break
    return Capabilities(**known, sources=sources)


def assumed(kind: Kind | None, version: str | None) -> Capabilities:
    """What engines of this kind and version can do as far as we know them."""
    if kind == OURS:
        return Capabilities(
            bidirectional=True,  # one that is not lets go of what it is given
            streams_carry_params=True,
            tokenize=True,
            return_token_ids=True,
            release=True,
            token_note=True,
            seal=True,
        )
    release = _release_of(version)
    return Capabilities(
        # Finish chunks have them since 0.33. Of an engine we do not know, a stream that has them will show it.
        streams_carry_params=None if kind is None or release is None else release >= (0, 33),
        return_token_ids=True if kind == "vllm" else None,
        release=False,
        token_note=False,
        seal=False,
    )


def _release_of(version: str | None) -> tuple[int, int] | None:
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def exchanges(p: Capabilities, d: Capabilities) -> bool:
    """Whether KV computed by one can be used by the other, as far as is known. They must serve one model besides."""
    return mismatch(p, d) is None


def mismatch(p: Capabilities, d: Capabilities) -> Mismatch | None:
    """Why not."""
    if p.kind != d.kind:
        return "kind"
    if p.kind == OURS:  # the fingerprint says it all, and versions are meant to be mixed
        return "kv_layout" if _differ(p.kv_layout, d.kv_layout) else _of_blocks(p, d)
    if _differ(p.version, d.version):
        return "version"  # part of what two vLLM engines compare before they exchange anything
    return _of_blocks(p, d)


def _of_blocks(p: Capabilities, d: Capabilities) -> Mismatch | None:
    if _differ(p.block_size, d.block_size):
        return "block_size"
    return "cache_dtype" if _differ(p.cache_dtype, d.cache_dtype) else None


Traits = tuple[Kind | None, str | None, int | None, str | None, str | None, bool | None]


def traits(known: Capabilities) -> Traits:
    """What decides who exchanges KV with whom, and who serves what: engines with the same are alike to a plan."""
    return (known.kind, known.version, known.block_size, known.cache_dtype, known.kv_layout, known.scale_out)


def _differ(one: int | str | None, other: int | str | None) -> bool:
    return one is not None and other is not None and one != other


class Lowered(NamedTuple):
    """A capability that is missing, and what turns do without it."""

    capability: str
    value: object
    words: str


_LOWERS: Final[tuple[tuple[str, str, tuple[bool | None, ...], str], ...]] = (
    ("kind", "both", (None,), "exchanges KV only with engines that are not known either"),
    ("bidirectional", "decode", (False,), "offers no KV to the next turn: prefill engines compute what they lack"),
    ("bidirectional", "prefill", (False,), "is given no KV of the last turn, and computes what it lacks"),
    ("bidirectional", "prefill", (None,), "one turn at a time is given KV of the last one, until it has shown to pull"),
    ("streams_carry_params", "decode", (False,), "a streamed answer offers no KV to the next turn"),
    ("streams_carry_params", "decode", (None,), "whether a streamed answer offers KV to the next turn will show"),
    ("tokenize", "both", (False,), "is not asked for a prompt's ids: with no other to ask, no KV is reused by them"),
    ("return_token_ids", "both", (False,), "what it computed is not known by its ids, and so not reused"),
    ("scale_out", "both", (False,), "no token ids in and out: such turns pass by its prefill, and it refuses them"),
    ("block_size", "decode", (None,), "KV of a history that was edited is reused whole or not at all"),
    ("release", "both", (False,), "blocks nobody will read wait for the end of their lease, or a P that can tell it"),
    ("seal", "both", (False,), "takes transfer params from whoever reaches its port: keep that to the router"),
)

_OF_ENCODERS: Final = ("kind", "seal")
"""What matters of an engine that encodes media and does nothing else."""


def lowers(known: Capabilities, role: str) -> Iterator[Lowered]:
    """What an engine of this role lacks, and what that costs."""
    for name, of_role, values, words in _LOWERS:
        value = getattr(known, name)
        if role == "encode" and name not in _OF_ENCODERS:
            continue
        if of_role in ("both", role) and any(value is one for one in values):
            if name == "block_size" and known.kind == OURS:
                continue  # its offers say it
            yield Lowered(name, value, words)

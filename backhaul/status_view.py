"""A router's status as lines of text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from pydantic import BaseModel, Field

MAX_WIDTH: Final = 60
BAR_WIDTH: Final = 40
NUM_TURNS: Final = 10
SOURCES: Final = {
    "cached": ("█", "in prefill engines' caches"),
    "pulled": ("▓", "pulled from decode engines"),
    "decode_cached": ("▒", "in caches of decode engines left alone"),
    "computed": ("·", "computed"),
    "decode_computed": ("·", "computed by decode engines left alone"),
    "unknown": ("?", "not told"),
}
"""Where prompt tokens came from: as a part of the bar, and in words."""

TURN_HEAD: Final = (
    *("ENDED", "ENDPOINT", "OUTCOME", "TURN", "PLAN", "KV", "PREFILL", "DECODE"),
    *("PROMPT", "CACHED", "PULLED", "COMPUTED", "TTFT MS", "MS"),
)


class Fact(BaseModel):
    value: bool | int | str
    source: str


class Lowered(BaseModel):
    capability: str
    words: str


class Load(BaseModel):
    running: int
    waiting: int
    kv_use: float
    blocks_idle: int | None = None


class Engine(BaseModel):
    url: str
    role: str
    state: str
    why: str = ""
    since: float | None = None
    in_flight: int
    load: Load | None = None
    idle_kv_blocks: int | None = None
    models: list[str]
    num_models: int
    capabilities: dict[str, Fact]
    lowers: list[Lowered]


class Redis(BaseModel):
    state: Literal["ok", "refuses", "silent"]
    why: str
    latency_ms: dict[str, float]


class Bucket(BaseModel):
    tokens: dict[str, int]
    turns: int = 0


class Turn(BaseModel):
    at: float
    endpoint: str
    outcome: str
    turn: int
    plan: str | None
    kv: str | None
    prefill: str | None
    decode: str | None
    tokens: dict[str, int]
    first_byte_ms: float | None
    ms: float


class Recent(BaseModel):
    buckets: list[Bucket]
    turns: list[Turn]


class Count(BaseModel):
    what: str
    why: str
    count: int


class Status(BaseModel):
    """The part of the answer that is shown."""

    version: str
    at: float = Field(default_factory=time.time)
    processes: int = 1
    ready: bool
    draining: bool
    turns_in_flight: int
    turns_waiting: dict[str, int] = {}
    redis: Redis | None = None
    engines: list[Engine]
    turns: dict[str, int]
    plans: dict[str, int]
    last_kv: dict[str, int]
    releases: dict[str, int]
    lowered: list[Count]
    recent: Recent | None = None


def lines(status: Status, url: str) -> Iterator[str]:
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    processes = f" ({status.processes} processes)" if status.processes > 1 else ""
    waiting = sum(status.turns_waiting.values())
    yield (
        f"backhaul {status.version} at {url}{processes}: {state}, {status.turns_in_flight} turns in flight"
        + (f", {waiting} waiting" if waiting else "")
    )
    if status.redis is not None:
        yield f"Redis {_redis(status.redis)}"
    yield ""
    if status.recent is not None:
        yield from _provenance(status.recent)
    yield from table(
        ("ROLE", "ENGINE", "STATE", "FOR", "IN FLIGHT", "RUNNING", "WAITING", "KV USE", "KEPT", "MODELS"),
        [_now(engine, status.at) for engine in status.engines],
    )
    if status.recent is not None and status.recent.turns:
        yield ""
        yield from table(TURN_HEAD, [_turn(turn) for turn in status.recent.turns[:NUM_TURNS]])
    yield ""
    yield from table(
        ("ROLE", "ENGINE", "KIND", "BLOCK", "TWO-WAY", "STREAMS", "TOKENIZE", "RELEASE"),
        [
            (
                engine.role,
                engine.url,
                " ".join(_value(engine, name) for name in ("kind", "version") if name in engine.capabilities) or "?",
                *(_value(engine, name) for name in ("block_size", "bidirectional", "streams_carry_params")),
                *(_value(engine, name) for name in ("tokenize", "release")),
            )
            for engine in status.engines
        ],
    )
    yield "yes, no: seen or stated; yes*, no*: assumed of its kind and version; ?: not known"
    if any(engine.lowers for engine in status.engines):
        yield ""
        yield "What turns do without:"
        yield from table(
            ("ROLE", "ENGINE", "CAPABILITY", "SO"),
            [(one.role, one.url, lack.capability, lack.words) for one in status.engines for lack in one.lowers],
            limit=120,
        )
    yield ""
    yield "Since its start:"
    yield f"  turns                  {_counts(status.turns)}"
    yield f"  engines chosen for     {_counts(status.plans)}"
    yield f"  KV of the turn before  {_counts(status.last_kv)}"
    yield f"  blocks given back      {_counts(status.releases)}"
    lowered = {f"{one.what} ({one.why})": one.count for one in status.lowered}
    yield f"  done without           {_counts(lowered)}"


def _redis(redis: Redis) -> str:
    words = {"ok": "answers", "refuses": f"refuses commands ({redis.why})", "silent": f"does not answer ({redis.why})"}
    times = ", ".join(f"{name} {value:.2f} ms" for name, value in redis.latency_ms.items())
    return words[redis.state] + (f", {times}" if times and redis.state == "ok" else "")


def _provenance(recent: Recent) -> Iterator[str]:
    """Where the prompt tokens of the last quarter of an hour came from."""
    sums = {source: sum(bucket.tokens.get(source, 0) for bucket in recent.buckets) for source in SOURCES}
    total = sum(sums.values())
    if not total:
        return
    bar, told, width = "", [], 0.0
    for source, (letter, words) in SOURCES.items():
        if sums[source]:
            width += BAR_WIDTH * sums[source] / total
            bar += letter * (round(width) - len(bar))
            told.append(f"{letter} {100 * sums[source] / total:.0f} % {words}")
    yield f"{total} prompt tokens in 15 minutes  [{bar}]"
    yield f"  {', '.join(told)}"
    yield ""


def _now(engine: Engine, at: float) -> tuple[str, ...]:
    load = engine.load
    kept = load.blocks_idle if load is not None and load.blocks_idle is not None else engine.idle_kv_blocks
    state = engine.state if engine.state == "ready" or not engine.why else f"{engine.state} ({engine.why})"
    return (
        engine.role,
        engine.url,
        state,
        "-" if engine.since is None else _for(at - engine.since),
        str(engine.in_flight),
        *(("-", "-", "-") if load is None else (str(load.running), str(load.waiting), f"{100 * load.kv_use:.0f} %")),
        "-" if kept is None else str(kept),
        _models(engine),
    )


def _turn(turn: Turn) -> tuple[str, ...]:
    host = {url: (url or "-").partition("://")[2] or "-" for url in (turn.prefill, turn.decode)}
    return (
        time.strftime("%H:%M:%S", time.localtime(turn.at)),
        turn.endpoint,
        turn.outcome,
        str(turn.turn),
        turn.plan or "-",
        turn.kv or "-",
        host[turn.prefill],
        host[turn.decode],
        *(str(turn.tokens.get(kind, "-")) for kind in ("prompt", "cached", "pulled", "computed")),
        "-" if turn.first_byte_ms is None else f"{turn.first_byte_ms:.0f}",
        f"{turn.ms:.0f}",
    )


def _for(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, limit: int = MAX_WIDTH) -> Iterator[str]:
    """Columns as wide as what is in them."""
    cut = [[cell if len(cell) <= limit else cell[: limit - 1] + "…" for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    for row in cut:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _value(engine: Engine, name: str) -> str:
    fact = engine.capabilities.get(name)
    if fact is None:
        return "?"
    if not isinstance(fact.value, bool):
        return str(fact.value)
    return ("yes" if fact.value else "no") + ("*" if fact.source == "assumed" else "")


def _models(engine: Engine) -> str:
    more = f" and {engine.num_models - 3} more" if engine.num_models > 3 else ""
    return ", ".join(engine.models[:3]) + more or "-"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "-"

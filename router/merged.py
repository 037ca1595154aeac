"""One status of a router of several processes, from that of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from router.recent import NUM_TURNS

Json = dict[str, Any]

COUNTS: Final = ("turns", "plans", "last_kv", "releases")
SUMS: Final = ("processes", "turns_in_flight", "offers_watched")
ENGINE_SUMS: Final = ("in_flight", "dispatched")
WORST_FIRST: Final = ("ejected", "probing", "joining", "suspect", "draining", "ready", "gone")
REDIS_WORST_FIRST: Final = ("silent", "refuses", "ok")


def merged(parts: Sequence[Json]) -> Json:
    """What is counted is added up. Where processes see an engine, or Redis, in different states, the worst is told: it
    is what some of the turns meet. Of what engines say of themselves, the newest part has it."""
    assert parts, "the status of one process at least"
    ordered = sorted(parts, key=lambda one: one["at"], reverse=True)
    newest = ordered[0]
    if len(ordered) == 1:
        return newest
    whole: Json = {
        **newest,
        **{name: sum(one[name] for one in ordered) for name in SUMS},
        **{name: _added(one[name] for one in ordered) for name in COUNTS},
        "ready": all(one["ready"] for one in ordered),
        "draining": any(one["draining"] for one in ordered),
        "turns_waiting": _added(one["turns_waiting"] for one in ordered),
        "redis": _redis([one["redis"] for one in ordered]),
        "engines": _engines(ordered),
        "lowered": _lowered(row for one in ordered for row in one["lowered"]),
    }
    if all("recent" in one for one in ordered):
        whole["recent"] = _recent([one["recent"] for one in ordered])
    return whole


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def _redis(parts: Sequence[Json]) -> Json:
    """The slowest and the worst of them."""
    worst = min(parts, key=lambda one: REDIS_WORST_FIRST.index(one["state"]))
    names = dict.fromkeys(name for one in parts for name in one["latency_ms"])
    return {
        **worst,
        "pending": sum(one["pending"] for one in parts),
        "latency_ms": {
            name: max(one["latency_ms"][name] for one in parts if name in one["latency_ms"]) for name in names
        },
        "operations": _added(one["operations"] for one in parts),
    }


def _engines(parts: Sequence[Json]) -> list[Json]:
    by_place: dict[tuple[str, str], list[Json]] = {}
    for part in parts:
        for engine in part["engines"]:
            by_place.setdefault((engine["role"], engine["url"]), []).append(engine)
    return [_engine(several) for several in by_place.values()]


def _engine(several: Sequence[Json]) -> Json:
    worst = min(several, key=lambda one: WORST_FIRST.index(one["state"]))
    states = _added({one["state"]: 1} for one in several)
    idle = [one["idle_kv_blocks"] for one in several if one["idle_kv_blocks"] is not None]
    return {
        **several[0],
        **{name: worst[name] for name in ("state", "why", "since")},
        **{name: sum(one[name] for one in several) for name in ENGINE_SUMS},
        "limit": None if worst["limit"] is None else sum(one["limit"] for one in several),
        "load": next((one["load"] for one in several if one["load"] is not None), None),
        "idle_kv_blocks": sum(idle) if idle else None,
        **({"states": states} if len(states) > 1 else {}),
    }


def _lowered(rows: Iterable[Json]) -> list[Json]:
    total: dict[tuple[str, str], int] = {}
    for row in rows:
        place = (row["what"], row["why"])
        total[place] = total.get(place, 0) + row["count"]
    return [{"what": what, "why": why, "count": count} for (what, why), count in total.items()]


def _recent(parts: Sequence[Json]) -> Json:
    buckets: dict[int, Json] = {}
    for part in parts:
        for one in part["buckets"]:
            bucket = buckets.setdefault(one["at"], {"at": one["at"], "tokens": {}})
            for name, value in one.items():
                if name == "tokens":
                    bucket["tokens"] = _added([bucket["tokens"], value])
                elif name != "at":
                    bucket[name] = bucket.get(name, 0) + value
    turns = sorted((turn for part in parts for turn in part["turns"]), key=lambda one: one["at"], reverse=True)
    return {**parts[0], "buckets": [buckets[at] for at in sorted(buckets)], "turns": turns[:NUM_TURNS]}

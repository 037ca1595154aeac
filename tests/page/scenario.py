"""What a busy router might tell: the status that the page is looked at with."""

from __future__ import annotations

import random
from typing import Any

from router.recent import BUCKET_SECONDS, NUM_BUCKETS, NUM_TURNS

NOW = 1_800_000_000.0
MODEL = "Qwen3-32B"
PHASES = ("read", "recall", "tokenize", "prefill", "decode", "remember")


def fact(value: object, source: str = "seen") -> dict[str, object]:
    return {"value": value, "source": source}


def engine(role: str, number: int, now: float, **changes: Any) -> dict[str, Any]:
    host = {"prefill": "10.4.1", "decode": "10.4.2"}[role]
    return {
        "url": f"http://{host}.{number}:8000",
        "role": role,
        "state": "ready",
        "why": "lists Qwen3-32B",
        "since": now - 7200,
        "in_flight": 3 if role == "prefill" else 18,
        "dispatched": 900,
        "limit": None,
        "load": {"running": 3, "waiting": 1, "kv_use": 0.41, "leases": 4, "blocks_pinned": 90, "blocks_idle": 2310},
        "idle_kv_blocks": 0 if role == "decode" else None,
        "models": [MODEL],
        "num_models": 1,
        "capabilities": {
            "kind": fact("backhaul"),
            "version": fact("0.1.0"),
            "block_size": fact(16),
            "num_blocks": fact(8192),
        },
        "lowers": [],
    } | changes


def turns(draw: random.Random, now: float) -> list[dict[str, Any]]:
    told = []
    at = now - 0.4
    for number in range(NUM_TURNS):
        prompt, nth = draw.randrange(400, 22_000), draw.randrange(1, 12)
        known = 0 if nth == 1 else int(prompt * draw.uniform(0.6, 0.97))
        pulled = int(known * draw.uniform(0, 0.5))
        plan = "new" if nth == 1 else draw.choice(["affinity"] * 8 + ["spill", "short_suffix"])
        alone = plan == "short_suffix"
        outcome = {7: "failed", 19: "client_gone", 31: "cut", 44: "rejected"}.get(number, "ok")
        computed = prompt - known
        phases = dict.fromkeys(PHASES, 0.3) | {"tokenize": 2.1, "prefill": 40 + computed * 0.09, "decode": 900.0}
        if alone:
            del phases["prefill"]
        first = sum(phases.values()) - phases["decode"] + 20
        tokens = {"prompt": prompt, "cached": known - pulled, "pulled": pulled, "computed": computed, "completion": 200}
        if alone:
            tokens |= {"cached": known}
            del tokens["pulled"]
        rejected = outcome == "rejected"
        told.append(
            {
                "at": round(at, 3),
                "endpoint": draw.choice(["chat", "chat", "chat", "completions", "responses"]),
                "model": MODEL,
                "outcome": outcome,
                "status": {"failed": 503, "rejected": 400, "client_gone": 499}.get(outcome, 200),
                "turn": nth,
                "attempts": 2 if number in (7, 12) else 0 if rejected else 1,
                "plan": None if rejected else plan,
                "kv": None if rejected else "own_cache" if alone else "no_record" if nth == 1 else "offered",
                "prefill": None if alone or rejected else f"http://10.4.1.{draw.randrange(1, 4)}:8000",
                "decode": None if rejected else f"http://10.4.2.{draw.randrange(1, 5)}:8000",
                "handoff": not alone,
                "tokens": {} if rejected else tokens,
                "ms": 0.8 if rejected else round(sum(phases.values()), 2),
                "first_byte_ms": None if rejected or outcome == "failed" else round(first, 2),
                "phases_ms": {"read": 0.8} if rejected else phases,
            }
        )
        at -= draw.uniform(0.05, 0.9)
    return told


def buckets(draw: random.Random, now: float) -> list[dict[str, Any]]:
    first = int(now) // BUCKET_SECONDS * BUCKET_SECONDS - (NUM_BUCKETS - 1) * BUCKET_SECONDS
    told = []
    for n in range(NUM_BUCKETS):
        if 60 <= n < 64:
            continue
        busy = (0.6 + 0.3 * (n / NUM_BUCKETS)) * draw.uniform(0.6, 1.3)
        lost = 3.5 if 95 <= n < 103 else 1.0  # an engine went: what it had is computed anew
        tokens = {
            "cached": int(52_000 * busy / lost),
            "pulled": int(31_000 * busy / lost),
            "computed": int(17_000 * busy * lost),
            "decode_cached": int(6_000 * busy),
            "decode_computed": int(900 * busy),
        }
        faults = {"faults": 2} if n == 96 else {}
        told.append(
            {
                "at": first + n * BUCKET_SECONDS,
                "turns": int(14 * busy),
                "completion": int(9_000 * busy),
                "tokens": tokens,
                **faults,
            }
        )
    return told


def busy_status(now: float = NOW) -> dict[str, Any]:
    draw = random.Random(3)
    vllm = {"kind": fact("vllm"), "version": fact("0.33.0"), "block_size": fact(16), "num_blocks": fact(12_288)}
    release = {
        "capability": "release",
        "value": False,
        "words": "blocks nobody will read wait for the end of their lease, or a P that can tell it",
    }
    seal = {
        "capability": "seal",
        "value": False,
        "words": "takes transfer params from whoever reaches its port: keep that to the router",
    }
    told = {"running": 0, "waiting": 0, "kv_use": 0.02, "leases": 0, "blocks_pinned": 0, "blocks_idle": 0}
    full = {"running": 30, "waiting": 6, "kv_use": 0.96, "leases": 61, "blocks_pinned": 400, "blocks_idle": 5120}
    of_vllm = {"running": 17, "waiting": 0, "kv_use": 0.63}
    return {
        "version": "0.1.0",
        "at": now,
        "processes": 2,
        "ready": True,
        "draining": False,
        "turns_in_flight": 64,
        "turns_waiting": {"prefill": 3, "decode": 0},
        "offers_watched": 412,
        "break_even_tokens": 61,
        "redis": {
            "state": "ok",
            "why": "",
            "pending": 1,
            "latency_ms": {"p50": 0.31, "p99": 1.84},
            "operations": {"hit": 9120, "hit_without_offer": 77, "miss": 1804, "ok": 10_893, "timeout": 3},
        },
        "engines": [
            engine("prefill", 1, now),
            engine("prefill", 2, now, in_flight=5),
            engine(
                "prefill", 3, now, state="ejected", why="connection refused", since=now - 41, in_flight=0, load=told
            ),
            engine("decode", 1, now),
            engine(
                "decode",
                2,
                now,
                state="suspect",
                why="timeout",
                since=now - 12,
                load=full,
                states={"ready": 1, "suspect": 1},
            ),
            engine("decode", 3, now, capabilities=vllm, lowers=[release, seal], load=of_vllm, idle_kv_blocks=5920),
            engine(
                "decode", 4, now, state="draining", why="an operator says so", since=now - 340, in_flight=2, limit=32
            ),
        ],
        "turns": {"ok": 10_871, "rejected": 31, "failed": 4, "cut": 2, "client_gone": 143},
        "plans": {"affinity": 8402, "new": 1760, "spill": 212, "short_suffix": 488, "moved": 9},
        "last_kv": {"offered": 8590, "no_record": 1771, "own_cache": 488, "short": 31, "owner_down": 9},
        "releases": {"ok": 1203, "waits_for_ttl": 310, "failed": 2},
        "lowered": [{"what": "pull", "why": "kind", "count": 9}],
        "recent": {"bucket_seconds": BUCKET_SECONDS, "buckets": buckets(draw, now), "turns": turns(draw, now)},
    }

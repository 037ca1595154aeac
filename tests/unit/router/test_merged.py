"""One status from those of several processes."""

from __future__ import annotations

import copy
from typing import Any

from router.merged import merged
from router.recent import NUM_TURNS
from tests.page.scenario import busy_status


def two() -> tuple[dict[str, Any], dict[str, Any]]:
    return busy_status(1000.0), busy_status(1001.0)


def test_one_is_as_it_is() -> None:
    status = busy_status()
    assert merged([status]) == status


def test_none_is_changed() -> None:
    parts = two()
    before = copy.deepcopy(parts)
    merged(parts)
    assert parts == before


def test_counts_are_added_up() -> None:
    one, other = two()
    other["turns"] = {"ok": 1, "new": 5}
    other["lowered"] = [{"what": "pull", "why": "kind", "count": 1}, {"what": "pull", "why": "version", "count": 2}]
    whole = merged([one, other])
    assert whole["processes"] == 4
    assert whole["turns_in_flight"] == 128
    assert whole["turns_waiting"] == {"decode": 0, "prefill": 6}
    assert whole["turns"]["ok"] == one["turns"]["ok"] + 1
    assert whole["turns"]["new"] == 5
    counts = {(row["what"], row["why"]): row["count"] for row in whole["lowered"]}
    assert counts == {("pull", "kind"): 10, ("pull", "version"): 2}
    assert whole["redis"]["operations"]["hit"] == 2 * one["redis"]["operations"]["hit"]


def test_the_worst_state_of_an_engine_is_told_and_who_sees_it_so() -> None:
    one, other = two()
    one["engines"][0] |= {"state": "ejected", "why": "timeout", "since": 5.0, "in_flight": 0}
    other["engines"][0] |= {"load": {"running": 9, "waiting": 0, "kv_use": 0.5}, "idle_kv_blocks": 7}
    engine = merged([one, other])["engines"][0]
    assert (engine["state"], engine["why"], engine["since"], engine["in_flight"]) == ("ejected", "timeout", 5.0, 3)
    assert engine["states"] == {"ejected": 1, "ready": 1}
    assert engine["load"]["running"] == 9  # the newest has it
    assert engine["idle_kv_blocks"] == 7
    assert "states" not in merged([one, other])["engines"][1]


def test_limits_hold_for_each_process() -> None:
    one, other = two()
    one["engines"][0]["limit"] = other["engines"][0]["limit"] = 8
    first, second, *_ = merged([one, other])["engines"]
    assert (first["limit"], second["limit"]) == (16, None)


def test_an_engine_that_one_process_has_not_found_yet() -> None:
    one, other = two()
    del other["engines"][0]
    urls = [(engine["role"], engine["url"]) for engine in one["engines"]]
    assert sorted((engine["role"], engine["url"]) for engine in merged([one, other])["engines"]) == sorted(urls)


def test_redis_is_as_bad_as_the_worst_says() -> None:
    one, other = two()
    other["redis"] |= {"state": "silent", "why": "TimeoutError", "latency_ms": {"p50": 9.0, "p99": 50.0}}
    redis = merged([one, other])["redis"]
    assert (redis["state"], redis["why"], redis["latency_ms"]["p99"]) == ("silent", "TimeoutError", 50.0)


def test_ready_is_what_all_are() -> None:
    one, other = two()
    assert merged([one, {**other, "ready": False, "draining": True}])["ready"] is False
    assert merged([one, {**other, "draining": True}])["draining"] is True


def test_recent_turns_are_the_newest_of_all() -> None:
    one, other = two()
    whole = merged([one, other])["recent"]
    assert len(whole["turns"]) == NUM_TURNS
    assert [turn["at"] for turn in whole["turns"]] == sorted((turn["at"] for turn in whole["turns"]), reverse=True)
    in_both = next(bucket for bucket in whole["buckets"] if bucket["at"] == 900)
    parts = [bucket for part in (one, other) for bucket in part["recent"]["buckets"] if bucket["at"] == 900]
    assert in_both["turns"] == sum(bucket["turns"] for bucket in parts)
    assert in_both["tokens"]["pulled"] == sum(bucket["tokens"]["pulled"] for bucket in parts)
    assert len(parts) == 2


def test_without_recent_turns_where_none_were_asked_for() -> None:
    one, other = two()
    del one["recent"], other["recent"]
    assert "recent" not in merged([one, other])

"""What Prometheus has to tell of a deployment: exact counts, whatever has died meanwhile, and an answer to everything
that rules and dashboards ask."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from deploy.generate import CHART
from tests.observe.live import CONVERSATIONS, Watched, play
from tests.observe.prometheus import RULES, program, prometheus, promtool
from tests.property.talker import make_talker

VARIABLES = {"$namespace": "test", "$job": "routers", "$__rate_interval": "2m", "$__range": "2m"}

COUNTED = ("_total", "_count", "_sum", "_bucket")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    program("prometheus")
    folder = tmp_path_factory.mktemp("live")
    model = make_talker(folder / "model")
    with ExitStack() as stack:
        yield asyncio.run(play(model, folder, lambda jobs: stack.enter_context(prometheus(folder, jobs))))


def queries() -> list[tuple[str, str]]:
    """Of all panels."""
    found = []
    for file in sorted((CHART / "files/dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            found += [(f"{file.stem}: {panel['title']}", target["expr"]) for target in panel.get("targets", ())]
    return found


def records() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]


@pytest.mark.timeout(180)
def test_counts_are_exact_through_the_death_of_a_process(watched: Watched) -> None:
    ask, at = watched.prometheus.value, watched.at
    assert watched.answered["ok"] == 2 * 2 * CONVERSATIONS
    assert (
        ask('sum(backhaul_router_turns_total{outcome="ok"})', at)
        == watched.answered["ok"] + watched.answered["aborted"]
    )
    for outcome in ("rejected", "client_gone"):
        assert ask(f'sum(backhaul_router_turns_total{{outcome="{outcome}"}})', at) == watched.answered[outcome]
    turns = sum(watched.answered.values())
    assert ask("sum(backhaul_router_turn_seconds_count)", at) == turns
    assert ask("sum(backhaul_router_process_restarts_total)", at) == 1
    names = watched.prometheus.ask("label/__name__/values")
    counters = [name for name in names if name.startswith("backhaul_router") and name.endswith(COUNTED)]
    assert len(counters) > 30
    for name in (*counters, "process_cpu_seconds_total"):
        assert ask(f'sum(resets({name}{{job="routers"}}[10m]) or vector(0))', at) == 0, name
    assert ask("min(min_over_time(backhaul_router_turns_in_flight[10m]))", at) == 0


def test_nothing_is_left_of_the_dead_process(watched: Watched) -> None:
    ask, at = watched.prometheus.value, watched.at
    assert ask("sum(backhaul_router_processes)", at) == 4
    assert ask("sum(backhaul_router_turns_in_flight)", at) == 0
    assert ask("count(backhaul_router_processes)", at) == 2
    assert (
        ask('count({__name__=~"backhaul_router_.+",pid!=""} or {__name__=~"process_.+",pid!=""}) or vector(0)', at) == 0
    )
    assert ask('count(count by (engine) (backhaul_router_engine_ready{job="routers"}))', at) == 4
    assert ask("min(backhaul_router_engine_ready)", at) == 1


def test_own_labels_survive_those_of_the_operator(watched: Watched) -> None:
    assert watched.prometheus.value('sum(backhaul_router_turns_total{endpoint="chat"})', watched.at) > 0


def test_turns_reused_what_was_there(watched: Watched) -> None:
    """Else the dashboards would be asked of nothing."""
    for kind in ("pulled", "cached", "computed", "completion"):
        assert watched.prometheus.value(f'sum(backhaul_router_tokens_total{{kind="{kind}"}})', watched.at) > 0, kind
    pulled = [
        watched.prometheus.value(f"sum({counter})", watched.at)
        for counter in (
            'backhaul_router_tokens_total{kind="pulled"}',
            'backhaul_engine_kv_tokens_pulled_total{source="decode"}',
        )
    ]
    assert pulled[0] == pulled[1]


@pytest.mark.parametrize(("panel", "expression"), queries())
def test_every_panel_has_something_to_show(watched: Watched, panel: str, expression: str) -> None:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    series = watched.prometheus.query(expression, watched.at)
    assert series, f"{panel}: nothing for {expression}"
    assert any(not math.isnan(float(one["value"][1])) for one in series), expression


@pytest.mark.parametrize("record", records())
def test_every_rule_records_something(watched: Watched, record: str) -> None:
    assert watched.prometheus.query(record, watched.at)


def test_rules_are_healthy_and_nothing_is_alarming(watched: Watched) -> None:
    groups = watched.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert watched.prometheus.query('ALERTS{alertstate="firing"}', watched.at) == []


@pytest.mark.parametrize("group", ["router", "prefill", "decode"])
def test_promtool_finds_nothing_to_say_of_metrics(watched: Watched, group: str) -> None:
    """But for vLLM's names, which are vLLM's."""
    told = promtool("check", "metrics", stdin=watched.expositions[group])
    complaints = (told.stdout + told.stderr).decode().splitlines()
    assert [line for line in complaints if not line.startswith("vllm:")] == []


def test_rules_are_what_promtool_takes() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr.decode()


def test_alerts_fire_when_they_should() -> None:
    tested = promtool("test", "rules", Path(__file__).with_name("alerts.yaml"))
    assert tested.returncode == 0, (tested.stdout + tested.stderr).decode()

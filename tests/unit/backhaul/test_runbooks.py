"""Whoever is woken by an alert finds out what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy/helm/backhaul/files/rules/backhaul.yaml"
TESTS = ROOT / "tests/observe/alerts.yaml"
PAGE = "docs/troubleshooting.md"
PARTS = ("*Symptom.*", "*Metric.*", "*Cause and action.*")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_alert_says_what_is_wrong_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"{PAGE}#{alert['alert'].lower()}"
    assert alert["labels"]["severity"] in ("critical", "warning")
    sections = (ROOT / PAGE).read_text().split("\n## ")
    [section] = [text for text in sections if text.startswith(f"{alert['alert']}\n")]
    assert all(part in section for part in PARTS)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_alert_is_tested_to_fire_and_not_to(alert: dict[str, Any]) -> None:
    tests = [
        bool(test["exp_alerts"])
        for group in yaml.safe_load(TESTS.read_text())["tests"]
        for test in group.get("alert_rule_test", ())
        if test["alertname"] == alert["alert"]
    ]
    assert set(tests) == {True, False}


def test_page_has_no_section_of_an_alert_that_is_gone() -> None:
    sections = [line.removeprefix("## ") for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("## ")]
    assert [name for name in sections if name.startswith("Backhaul")] == [alert["alert"] for alert in alerts()]

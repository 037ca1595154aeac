"""The time a turn takes, by what it does."""

from __future__ import annotations

import re

import pytest

from router import report as module
from router.metrics import Metrics
from router.report import Report


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says, to be set."""
    now = [100.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])
        time = staticmethod(lambda: 0.0)

    monkeypatch.setattr(module, "time", Clock)
    return now


def test_phases_follow_each_other_and_add_up(time: list[float]) -> None:
    report = Report("id", "chat", started=100.0)
    for seconds, phase in ((1, "recall"), (2, "tokenize"), (4, "recall"), (8, "prefill"), (16, "decode")):
        time[0] += seconds
        report.enter(phase)  # type: ignore[arg-type]
    time[0] += 32
    assert report.server_timing() == (
        "read;dur=1000.0, recall;dur=10000.0, tokenize;dur=4000.0, prefill;dur=16000.0, decode;dur=32000.0, "
        "total;dur=63000.0"
    )
    assert report.settle(Metrics(["chat"])) == 63
    assert report.phases == {"read": 1, "recall": 10, "tokenize": 4, "prefill": 16, "decode": 32}
    assert report.phase is None


def test_explained_answers_have_server_timing(time: list[float]) -> None:
    explained = Report("id", "chat", decode="http://user:secret@d:1", started=100.0).explain()
    assert re.fullmatch(r"read;dur=\d+\.\d, total;dur=\d+\.\d", explained["Server-Timing"])
    assert explained["X-Backhaul-Decode"] == "http://d:1"

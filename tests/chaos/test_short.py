"""Half a minute of faults against a small deployment under load: a fault costs a retry at most, never an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.campaign import Plan, campaign
from tests.chaos.faults import ENGINE_FAULTS
from tests.chaos.fleet import fleet
from tests.chaos.results import Results
from tests.property.reference import Reference

PLAN = Plan(seed=6, seconds=24.0, clients=20, warm_up=4.0, pause=(0.2, 1.0))
AT_LEAST = {
    "turns": 150,
    "turns answered right": 110,
    "turns answered after a retry": 2,
    "clients gone before the end": 3,
    "tokens pulled for turns": 300,
}
"""What must have happened for the run to mean something: half of what usually does, or less."""
NUM_FAULTS = 10
NUM_KINDS = 4


@pytest.mark.timeout(400)
async def test_faults_cost_a_retry_and_never_an_answer(talker: Path, reference: Reference, tmp_path: Path) -> None:
    results = Results("Half a minute of faults")
    async with fleet(talker, tmp_path, sentinel=True) as started:
        await campaign(started, reference, PLAN, results)
    print(results.text())
    assert results.passed, results.text()
    results.tally.require(AT_LEAST)
    assert sum(results.faults.values()) >= NUM_FAULTS
    assert len({kind for kind, _ in results.faults} & set(ENGINE_FAULTS)) >= NUM_KINDS

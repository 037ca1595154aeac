"""The equality property: whatever clients do to their histories, and whatever becomes of the KV meanwhile, every answer
is that of one cold engine, token for token; and nothing is reused that no engine had computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.property.campaign import campaign
from tests.property.fleet import Fleet, fleet
from tests.property.reference import Reference
from tests.property.script import history

HISTORIES = 200
AT_LEAST = {
    "histories": HISTORIES,
    "turns": 4 * HISTORIES,
    "prompt canonical": 300,
    "answer stop": 125,
    "answer length": 125,
    "answer of /v1/responses": 60,
    "answer of /inference/v1/generate": 25,
    "clients gone": 6,
    "parallel turns": 12,
    "unknown models": 3,
    "prompt spliced": 25,
    "turns with a pull": 90,
    "plan short_suffix": 25,
    "kv self_checked": 3,
    "kv mismatch": 6,
    "kv no_offer": 12,
    "kv no_record": 90,
    "pulled by prefill": 5000,
    "pulled by decode": 12500,
    "cached by prefill": 6000,
    "preemptions of decode": 1,
    'decode backhaul_engine_leases_ended_total{by="revoked"}': 60,
    'decode backhaul_engine_leases_ended_total{by="released"}': 180,
    'prefill backhaul_engine_kv_pulls_failed_total{reason="claim"}': 3,
    'decode backhaul_engine_kv_pulls_failed_total{reason="timeout"}': 3,
    'prefill backhaul_engine_kv_not_pulled_total{reason="hashes"}': 1,
}
"""What must have happened for the run to mean something: half of what usually does, or less."""


@pytest.fixture(scope="module")
def engines(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(talker, tmp_path_factory.mktemp("fleet")) as started:
        yield started


@pytest.mark.timeout(300)
async def test_every_answer_is_that_of_a_cold_single_engine(engines: Fleet, reference: Reference) -> None:
    tally = await campaign(engines, reference, map(history, range(HISTORIES)))
    tally.require(AT_LEAST)

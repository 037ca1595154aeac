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

HISTORIES = 320
AT_LEAST = {
    "histories": HISTORIES,
    "turns": 4 * HISTORIES,
    "prompt canonical": 500,
    "answer stop": 200,
    "answer length": 200,
    "answer of /v1/responses": 100,
    "answer of /inference/v1/generate": 40,
    "clients gone": 10,
    "parallel turns": 20,
    "unknown models": 5,
    "prompt spliced": 40,
    "turns with a pull": 150,
    "plan short_suffix": 40,
    "kv self_checked": 5,
    "kv mismatch": 10,
    "kv no_offer": 20,
    "kv no_record": 150,
    "pulled by prefill": 8000,
    "pulled by decode": 20000,
    "cached by prefill": 10000,
    "preemptions of decode": 1,
    'decode backhaul_engine_leases_ended_total{by="revoked"}': 100,
    'decode backhaul_engine_leases_ended_total{by="released"}': 300,
    'prefill backhaul_engine_kv_pulls_failed_total{reason="claim"}': 5,
    'decode backhaul_engine_kv_pulls_failed_total{reason="timeout"}': 5,
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

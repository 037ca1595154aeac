"""Every engine and router is restarted, one after the other, under load behind a load balancer: no request fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.fleet import fleet
from tests.chaos.haproxy import Unavailable, haproxy
from tests.chaos.results import Results
from tests.chaos.rolling import rolling
from tests.property.reference import Reference

CLIENTS = 20


@pytest.mark.timeout(400)
async def test_rolling_restart_fails_no_request(talker: Path, reference: Reference, tmp_path: Path) -> None:
    try:
        haproxy(tmp_path, [])
    except Unavailable as why:
        pytest.skip(str(why))
    results = Results("Rolling restart behind haproxy")
    async with fleet(talker, tmp_path, sentinel=False, trouble=False) as started:
        await rolling(started, reference, results, clients=CLIENTS)
    print(results.text())
    assert results.passed, results.text()
    assert results.tally["parts restarted"] == len(started.engines) + len(started.routers)
    assert results.tally["turns answered right"] > CLIENTS
    cut = [name for name in results.tally if "cut" in name and results.tally[name]]
    assert not cut, results.text()

"""The router's benchmark, run for a moment: real router, Valkey and stub engines, and no answer missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.native.build import compiler


@pytest.mark.skipif(compiler() is None, reason="no C compiler here")
def test_a_short_run_ends_without_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.router", "--seconds", "0.5", "--rounds", "1", "--cases", "stream,later"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "measured.json")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["bad"] == 0
    assert {(run["case"], run["side"]) for run in measured["runs"]} == {
        (case, side) for case in ("stream", "later") for side in ("backhaul", "passthrough")
    }
    assert all(run["load"]["good"] > 0 for run in measured["runs"])
    # Its conversations went on: the last turn's blocks were offered to the prefill engine.
    assert measured["counters"]['backhaul_router_plans_total{kv="offered",reason="affinity"}'] > 0

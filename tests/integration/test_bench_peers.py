"""The bench beside other routers, run for a moment without them: it says so, and no answer is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.native.build import compiler


@pytest.mark.skipif(compiler() is None, reason="no C compiler here")
def test_a_short_run_without_peers_ends_without_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.peers", "--seconds", "0.2", "--latency-seconds", "0.2"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--sections", "saturation,latency", "--json", str(tmp_path / "measured.json")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vllm-router: not given, takes no part" in done.stdout
    samples = json.loads((tmp_path / "measured.json").read_text())["samples"]
    assert {(one["section"], one["case"]) for one in samples if one["side"] == "Backhaul"} == {
        *(("saturation", case) for case in ("off", "on", "later", "off-30k", "on-30k")),
        *(("latency", case) for case in ("off", "kept", "on")),
    }
    assert all(one["load"]["good"] > 0 and one["load"]["bad"] == 0 for one in samples)

"""The openai npm client, unchanged, against the router with real engines behind it: tests/clients/matrix.mjs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.support import Stack

pytestmark = pytest.mark.model
CLIENTS = Path(__file__).parents[1] / "clients"
SECONDS = 110


def test_every_case_of_the_matrix(stack: Stack) -> None:
    node = shutil.which("node")
    if node is None or not (CLIENTS / "node_modules" / "openai").is_dir():
        pytest.skip("needs node and npm: `make clients` installs the client")
    ran = subprocess.run(
        [node, "matrix.mjs", stack.base_url, stack.model],
        cwd=CLIENTS,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) > 10, ran.stderr
    assert {result["name"]: result["why"] for result in results if not result["ok"]} == {}

"""Start the whole stack for a benchmark and take it down again."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

START_TIMEOUT = 120.0


@contextlib.contextmanager
def running_stack(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """`backhaul up FLAGS`, with `env` added to the environment; yields the facts it writes when everything is ready."""
    with tempfile.TemporaryDirectory(prefix="backhaul-bench-") as folder:
        ready = Path(folder) / "up.json"
        command = [sys.executable, "-m", "backhaul", "up", "--port", "0", "--json", str(ready), *flags]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ, **(env or {})}
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("backhaul up did not become ready")
                time.sleep(0.05)
            yield json.loads(ready.read_text())
        finally:
            process.terminate()
            process.wait(30)


def provenance() -> str:
    """One line that says which code ran where and when."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return f"commit {commit or 'unknown'} · {cpu_name()} · {date.today().isoformat()}"


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

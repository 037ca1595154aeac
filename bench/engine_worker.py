"""An engine to be measured in a process of its own, told what to do by lines of JSON: both ends of that.

The process may have another Python than this one, with another engine's packages: this file needs nothing but the
standard library.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol


class Measured(Protocol):
    """An engine's model, without a server."""

    def about(self) -> str:
        """Its name and version."""

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to the logits that follow it."""

    def open(self, prompt: Sequence[int], batch: int) -> None:
        """Get `batch` sequences ready that have this prompt, each with KV in memory of its own."""

    def decode(self, steps: int) -> float:
        """Seconds per step, the median: one token more for every open sequence."""

    def close(self) -> None:
        """Forget the open sequences."""


def median_seconds(steps: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def serve(make: Callable[[], Measured]) -> None:
    """The worker's end: obey until there is nothing more to read."""
    # Engines print; only answers go where the bench reads.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = make()

    def answer(value: str | float | None) -> None:
        answers.write(json.dumps(value) + "\n")

    answer(engine.about())
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer(getattr(engine, name)(*arguments))


class Worker:
    """The bench's end; implements Measured."""

    def __init__(self, python: Path, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._module = module
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env={**os.environ, **env},
            cwd=Path(__file__).parents[1],
        )
        self._about: str = self._answer()

    def about(self) -> str:
        return self._about

    def prefill(self, prompt: Sequence[int]) -> float:
        return float(self._ask("prefill", list(prompt)))

    def open(self, prompt: Sequence[int], batch: int) -> None:
        self._ask("open", list(prompt), batch)

    def decode(self, steps: int) -> float:
        return float(self._ask("decode", steps))

    def close(self) -> None:
        self._ask("close")

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, *command: object) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended, and has said why
            self._process.stdin.write(json.dumps(command) + "\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read()[-2000:]
            raise SystemExit(f"{self._module} ended\n{said}")
        return json.loads(line)

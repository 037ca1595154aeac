"""Real engine processes, started as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0


@dataclass
class Engine:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels, and the sum over the labels by the bare name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        samples: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
                bare = name.split("{", 1)[0]
                samples[bare] = samples.get(bare, 0.0) + float(value)
        return samples

    def post(self, path: str, body: dict[str, Any], *, timeout: float = 30.0) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT)


def engine_command(model: Path | str, *flags: str) -> list[str]:
    base = [sys.executable, "-m", "backhaul", "engine", "--model", str(model), "--threads", "1"]
    return [*base, "--log-level", "info", *flags]


@contextmanager
def engines(folder: Path, *commands: Sequence[str]) -> Iterator[list[Engine]]:
    """Start these engines together, on free ports; yields when all are ready, and ends those still running."""
    started = []
    try:
        for index, command in enumerate(commands):
            ready, log = folder / f"{index}.json", folder / f"{index}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, "--port", "0", "--json-file", str(ready)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            started.append((process, ready, log))
        yield [_wait_ready(*one) for one in started]
    finally:
        for process, _, _ in started:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> Engine:
    wait_until(lambda: ready.exists() or process.poll() is not None, START_TIMEOUT, f"{ready} appears")
    assert ready.exists(), f"the engine ended with {process.returncode}:\n{log.read_text()[-3000:]}"
    return Engine(process, json.loads(ready.read_text())["url"], log)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)

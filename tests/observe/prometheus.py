"""A real Prometheus, on a port of its own, that scrapes what a test runs."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import prometheus as programs
from deploy.tools import Unavailable
from tests.valkey import free_port

RULES = Path(__file__).parents[2] / "deploy/helm/backhaul/files/rules/backhaul.yaml"
START_SECONDS = 20.0
SCRAPE = "1s"


def program(name: str) -> Path:
    """Where it cannot be had, the test says so."""
    try:
        return programs.promtool() if name == "promtool" else programs.prometheus()
    except Unavailable as error:
        pytest.skip(str(error))


def promtool(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program("promtool"), *arguments], input=stdin, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series, each with its value."""
        when = {} if at is None else {"time": f"{at:.3f}"}
        return list(self.ask("query", query=expression, **when)["result"])

    def value(self, expression: str, at: float | None = None) -> float:
        [series] = self.query(expression, at)
        return float(series["value"][1])


@contextmanager
def prometheus(folder: Path, jobs: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """`jobs`: addresses by job. Each is given the labels that Prometheus' operator gives to pods, one of which is a
    label of our own too."""
    port = free_port()
    labels = {"namespace": "test", "endpoint": "http", "container": "c", "service": "s"}
    config = {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": job,
                "honor_labels": True,
                "static_configs": [
                    {"targets": [address], "labels": {**labels, "pod": f"{job}-{number}"}}
                    for number, address in enumerate(addresses)
                ],
            }
            for job, addresses in jobs.items()
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = [program("prometheus"), f"--config.file={file}", f"--web.listen-address=127.0.0.1:{port}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(server):
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "Prometheus does not start"
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait(10)


def _is_ready(server: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/-/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

"""The engine's container as the chart renders it: it starts, passes its probes, and listens on no port but those that
network policies admit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.deploy.cases import PLAIN
from tests.deploy.mounts import brought
from tests.deploy.objects import Manifest, container_of, pod_of, render
from tests.valkey import free_port

pytestmark = pytest.mark.usefixtures("helm")

START_SECONDS = 100


def _passes(container: Manifest, probe: str) -> bool:
    [port] = [one["containerPort"] for one in container["ports"] if one["name"] == "http"]
    rendered = container[probe]
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{rendered['httpGet']['path']}", timeout=rendered["timeoutSeconds"]
        ) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_container_starts_and_listens_where_it_is_admitted(tiny_model: Path, tmp_path: Path) -> None:
    port, first = free_port(), free_port()
    values = {
        **PLAIN,
        "sealKeySecret": {"name": "seal"},
        "pools": {
            "common": {
                "model": str(tiny_model),
                "port": port,
                "config": {"threads": 1, "num_gpu_blocks_override": 64, "max_model_len": 512},
                "kvTransfer": {"ucx": {"firstPort": first, "lastPort": first + 50}},
            }
        },
    }
    rendered = render(values)
    workload = rendered.workload("prefill")
    container, brought_here = container_of(workload), brought(rendered, "prefill", tmp_path / "etc")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())  # with the kernels
    environment = {**brought_here.env, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "backhaul", *brought_here.args],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _passes(container, "startupProbe"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert _passes(container, "readinessProbe")
        assert _passes(container, "livenessProbe")
        connections = psutil.Process(process.pid).net_connections("tcp")
        listening = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        assert port in listening
        assert len(listening) > 1, "UCX listens as well"
        assert listening - {port} <= set(range(first, first + 51))
        process.send_signal(signal.SIGTERM)
        assert process.wait(pod_of(workload)["terminationGracePeriodSeconds"]) == 0
    finally:
        process.kill()
        process.wait()

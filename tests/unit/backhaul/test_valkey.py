from __future__ import annotations

import importlib.util
import os
import signal
import socket
from pathlib import Path

import pytest
import redis.asyncio as redis

from backhaul import processes, valkey
from backhaul.errors import CommandError
from backhaul.processes import ChildDied


async def test_the_server_is_private_bounded_and_keeps_nothing_on_disk(tmp_path: Path) -> None:
    store = await valkey.start_valkey(tmp_path, tmp_path / "log", maxmemory="64mb")
    try:
        async with redis.Redis.from_url(store.url) as client:
            assert await client.ping()
            settings = await client.config_get("*")
        assert settings["save"] == ""
        assert settings["appendonly"] == "no"
        assert settings["maxmemory"] == str(64 << 20)
        assert settings["maxmemory-policy"] == "allkeys-lru"
        assert settings["bind"] == "127.0.0.1"
        async with redis.Redis.from_url(store.url.replace("//:", "//:x")) as stranger:
            with pytest.raises(redis.AuthenticationError):
                await stranger.ping()
        password = store.url.split(":")[2].split("@")[0]
        assert password not in Path(f"/proc/{store.child.pid}/cmdline").read_text()
        assert (tmp_path / "valkey.conf").stat().st_mode & 0o077 == 0
    finally:
        await store.child.stop(grace=2)
    assert store.child.process.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "valkey.conf"]


async def test_a_port_taken_in_between_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_port = valkey._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(valkey, "_free_port", lambda: next(ports))
        store = await valkey.start_valkey(tmp_path, tmp_path / "log")
        await store.child.stop(grace=2)
    assert next(ports, None) is None


async def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChildDied, match="argument"):
        await valkey.start_valkey(tmp_path, tmp_path / "log", maxmemory="plenty")


async def test_its_death_is_told(tmp_path: Path) -> None:
    store = await valkey.start_valkey(tmp_path, tmp_path / "log")
    os.kill(store.child.pid, signal.SIGKILL)
    await store.child.wait()
    assert "store died (killed by SIGKILL)" in str(processes.ChildDied(store.child))


def test_a_server_on_the_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match=r"\.\[embedded\]"):
        valkey.find_server()
    server = tmp_path / "redis-server"
    server.touch(mode=0o755)
    assert valkey.find_server() == server

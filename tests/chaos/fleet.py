"""Everything that a small deployment has, as real processes: engines behind a network that can fail, routers, a store
with a replica and a Sentinel."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.parts import Group, Part
from tests.chaos.trouble import Trouble
from tests.property.fleet import LAUNCHER, Shape
from tests.valkey import free_port, server_binary

SERVICE = "backhaul"
"""What the Sentinel calls the store."""
LEASE_SECONDS = 5.0
OFFER_SECONDS = 12.0
ENGINES = (
    Shape("prefill", 1000.0, num_blocks=200, max_batched=256, threshold=16, lease=LEASE_SECONDS, transfer_timeout=4.0),
    Shape("prefill", 0.0, num_blocks=120, max_batched=64, threshold=0, lease=LEASE_SECONDS, transfer_timeout=4.0),
    Shape("decode", -1000.0, num_blocks=240, max_batched=256, threshold=16, decoder_ttl=OFFER_SECONDS,
          lease=LEASE_SECONDS, transfer_timeout=4.0),
    Shape("decode", 500.0, num_blocks=160, max_batched=64, threshold=16, decoder_ttl=OFFER_SECONDS,
          lease=LEASE_SECONDS, transfer_timeout=4.0),
)  # fmt: skip
ROUTER: dict[str, Any] = {
    "conversation_ttl": 10.0,
    "kv_recompute_threshold": 16,
    "decode_only_tokens": 24,
    "dispatch_deadline": 4.0,
    "redis_timeout": 0.5,
    "connect_timeout": 3.0,
    "probe_interval": 0.5,
    "probe_timeout": 3.0,
    "pull_timeout": 10.0,
    "prefill_timeout": 30.0,
    "first_byte_timeout": 30.0,
    "idle_timeout": 10.0,
    "drain_delay": 1.0,
    "drain_timeout": 45.0,
}
"""Deadlines that a machine with two busy cores can keep, and that end before clients lose patience."""


@dataclass
class Fleet:
    folder: Path
    parts: list[Part]
    client: aiohttp.ClientSession
    out: dict[str, str] = field(default_factory=dict)
    """Parts that a fault has hold of, by name, and which."""

    def group(self, *groups: Group) -> list[Part]:
        return [part for part in self.parts if part.group in groups]

    @property
    def engines(self) -> list[Part]:
        return self.group("prefill", "decode")

    @property
    def routers(self) -> list[Part]:
        return self.group("router")

    @property
    def store_ports(self) -> list[int]:
        return [part.port for part in self.group("store") if not part.name.startswith("sentinel")]

    async def start(self) -> None:
        for part in self.parts:
            part.spawn()
        async with asyncio.TaskGroup() as group:
            for part in self.parts:
                group.create_task(part.serve(self.client))
        for part in self.engines:
            while not await self.is_seen(part):  # noqa: ASYNC110 (it happens elsewhere)
                await asyncio.sleep(0.05)

    async def is_seen(self, part: Part) -> bool:
        """Whether the part serves, and every router that can be asked counts on it."""
        if not await part.serves(self.client):
            return False
        if part not in self.engines:
            return True
        return all([await self._counts_on(router, part) for router in self.routers if router.name not in self.out])

    async def is_given_up(self, engine: Part) -> bool:
        """Whether no router that can be asked counts on it."""
        asked = [router for router in self.routers if router.name not in self.out]
        return not any([await self._counts_on(router, engine) for router in asked])

    async def _counts_on(self, router: Part, engine: Part) -> bool:
        try:
            async with self.client.get(f"{router.url}/ready", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                listed = (await answer.json())["engines"]
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return any((one["url"], one["state"]) == (engine.seen_url, "ready") for one in listed)

    async def metrics(self, part: Part) -> dict[str, float]:
        """Every sample by its name with labels, and the sum over the labels by the bare name."""
        samples: dict[str, float] = {}
        async with self.client.get(f"{part.url}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if not line.startswith("#"):
                    name, value = line.rsplit(" ", 1)
                    samples[name] = float(value)
                    bare = name.split("{", 1)[0]
                    samples[bare] = samples.get(bare, 0.0) + (float(value) if bare != name else 0.0)
        return samples


@asynccontextmanager
async def fleet(
    model: Path, folder: Path, *, sentinel: bool, trouble: bool = True, shapes: Iterable[Shape] = ENGINES, **router: Any
) -> AsyncIterator[Fleet]:
    """All of it, serving; ended whatever becomes of it."""
    engines = [_engine(shape, model, folder, number % 2, trouble) for number, shape in enumerate(shapes)]
    store = _store(folder, sentinel)
    redis = f"redis://127.0.0.1:{store[0].port}/0"
    if sentinel:
        redis = f"redis+sentinel://127.0.0.1:{store[-1].port}/{SERVICE}"
    routers = [_router(number, engines, redis, folder, ROUTER | router) for number in range(2)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client:
        started = Fleet(folder, [*store, *engines, *routers], client)
        try:
            await started.start()
            yield started
        finally:
            for part in started.parts:
                part.discard()
                if part.trouble is not None:
                    await part.trouble.close()


def _engine(shape: Shape, model: Path, folder: Path, number: int, trouble: bool) -> Part:
    port = free_port()
    role: Group = "prefill" if shape.role == "prefill" else "decode"
    return Part(
        f"{role} {number}",
        role,
        [*shape.command(model), "--port", str(port), "--drain-timeout", "30"],
        port,
        folder,
        "/v1/models",
        Trouble(free_port(), port) if trouble else None,
    )


def _router(number: int, engines: list[Part], redis: str, folder: Path, settings: dict[str, Any]) -> Part:
    port, file = free_port(), folder / f"router-{number}.json"
    urls = {role: [part.seen_url for part in engines if part.group == role] for role in ("prefill", "decode")}
    file.write_text(json.dumps({"port": port, "redis": redis, **urls, **settings}))
    command = [sys.executable, str(LAUNCHER), "0", "0", "router", "--config", str(file)]
    return Part(f"router {number}", "router", command, port, folder, "/ready")


def _store(folder: Path, sentinel: bool) -> list[Part]:
    main, replica = (_valkey(folder, number) for number in range(2))
    replica.command += ["--replicaof", "127.0.0.1", str(main.port)]
    if not sentinel:
        return [main, replica]
    port, file = free_port(), folder / "sentinel.conf"
    file.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {main.port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 1000\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )
    command = [str(server_binary()), str(file), "--sentinel"]
    return [main, replica, Part("sentinel", "store", command, port, folder, is_ours=False)]


def _valkey(folder: Path, number: int) -> Part:
    port = free_port()
    command = [
        *(str(server_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--dir", str(folder)),
    ]
    return Part(f"valkey {number}", "store", command, port, folder, is_ours=False)

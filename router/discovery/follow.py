"""Keeps pools as their sources say: engines that are written down join at once, the others as they are found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from router.background import must_go_on
from router.discovery.kube import Cluster
from router.discovery.parse import parse
from router.discovery.source import Found, Source
from router.member import Role
from router.pool import Pool

SETTINGS: Final = "settings"


class Discovery:
    def __init__(self, pool: Pool, entries: Mapping[Role, Sequence[str]], cluster: Cluster) -> None:
        """`entries`: engines' URLs and those of sources. Raises ValueError for a source that cannot work here."""
        self._pool = pool
        self._sources: list[tuple[Role, Source]] = []
        self._tasks: list[asyncio.Task[None]] = []
        for role, texts in entries.items():
            parsed = [parse(text, cluster) for text in texts]
            self._sources += [(role, one) for one in parsed if not isinstance(one, str)]
            pool.update(role, SETTINGS, [Found(one) for one in parsed if isinstance(one, str)])

    def start(self) -> None:
        for role, source in self._sources:
            task = asyncio.create_task(self._follow(role, source), name=f"follow {source.name}")
            must_go_on(task, "a source of engines is no longer followed")
            self._tasks.append(task)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _follow(self, role: Role, source: Source) -> None:
        await source.follow(lambda found: self._pool.update(role, source.name, found))

"""A source that mirrors a collection of Kubernetes objects.

Round after round: list the collection, then watch it until the watch ends, for whatever reason. A list is the whole
truth, so nothing that was missed between two watches, a deletion least of all, is missed for longer than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import ClientError

from router.discovery.kube import Api, ApiError, Cluster, Expired, at, connect, word
from router.discovery.source import Changes, Found, Pause, Problems, Tell, one_each

STEADY_SECONDS: Final = 1.0  # a watch that lasted so long was a good one

_CONNECTION_ERRORS: Final = (ClientError, OSError)  # TimeoutError is one of them


class Unusable(Exception):
    """An object from which no engine can be told, because something is set wrong."""


Read = Callable[[object], Sequence[Found]]
"""The engines an object tells of. May raise Unusable."""


@dataclass(frozen=True, slots=True)
class Collection:
    """Which objects: some of a kind, in one namespace."""

    api: str
    """Such as /api/v1."""
    kind: str
    """Such as pods."""
    namespace: str
    """Empty for the router's own."""
    selector: str

    def path(self, cluster: Cluster) -> str:
        """Raises OSError if the router's namespace cannot be read."""
        return f"{self.api}/namespaces/{self.namespace or cluster.namespace()}/{self.kind}"


class CollectionSource:
    def __init__(self, name: str, cluster: Cluster, collection: Collection, read: Read) -> None:
        self.name = name
        self._cluster = cluster
        self._collection = collection
        self._read = read
        self._problems = Problems(name)
        self._unusable = Problems(name)

    def check(self) -> None:
        """Raises ValueError where it can never be asked."""
        try:
            self._cluster.check()
            self._collection.path(self._cluster)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.name}: {error}") from None

    async def follow(self, tell: Tell) -> None:
        changes, pause = Changes(tell), Pause(self._cluster.longest_pause)
        while True:
            try:
                # With the token of now: it is replaced every hour or so, and when it is refused.
                async with connect(self._cluster) as api:
                    await self._round(api, changes, pause)
            except Expired:
                pass
            except ApiError as error:
                self._problems.note(f"status {error.status}", str(error))
            except _CONNECTION_ERRORS as error:
                kind = type(error).__name__
                self._problems.note(kind, f"{kind}: {error}" if str(error) else kind)
            await asyncio.sleep(pause.take())

    async def _round(self, api: Api, changes: Changes, pause: Pause) -> None:
        path, selector = self._collection.path(self._cluster), self._collection.selector
        seen: dict[str, Sequence[Found]] = {}
        rest = ""
        while True:
            page = await api.page(path, selector, rest)
            for one in page.items:
                seen[_key(one)] = self._engines(one)
            rest = page.rest
            if not rest:
                break
        changes.tell(_all(seen))
        async with api.watch(path, selector, page.version) as events:
            self._problems.over()
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                async with asyncio.timeout(self._cluster.watch_seconds + self._cluster.grace_seconds):
                    async for kind, one in events:
                        if self._happened(seen, kind, one):
                            changes.tell(_all(seen))
            except _CONNECTION_ERRORS:
                pass  # watches end in many ways; if there is a problem, the next list has it
            finally:
                if loop.time() - began > STEADY_SECONDS:
                    pause.reset()

    def _happened(self, seen: dict[str, Sequence[Found]], kind: str, one: object) -> bool:
        """Whether anything may be another now."""
        key = _key(one)
        if kind == "DELETED":
            return bool(seen.pop(key, ()))
        if kind not in ("ADDED", "MODIFIED"):
            return False  # a bookmark: the version it tells is that of the next list anyway
        before, seen[key] = seen.get(key, ()), self._engines(one)
        return seen[key] != before

    def _engines(self, one: object) -> Sequence[Found]:
        try:
            return self._read(one)
        except Unusable as error:
            self._unusable.note("unusable", f"{_key(one)}: {error}")
            return ()


def _key(one: object) -> str:
    return word(at(one, "metadata", "name"))


def _all(seen: dict[str, Sequence[Found]]) -> tuple[Found, ...]:
    return one_each(found for engines in seen.values() for found in engines)

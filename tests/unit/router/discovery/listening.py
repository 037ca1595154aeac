"""What a source tells, to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from router.discovery.source import Found, Source


class Heard:
    """All lists a source told."""

    def __init__(self) -> None:
        self.lists: list[Sequence[Found]] = []
        self._changed = asyncio.Event()

    def tell(self, found: Sequence[Found]) -> None:
        self.lists.append(found)
        self._changed.set()

    @property
    def urls(self) -> list[str]:
        """Of the last list; those that are leaving in brackets."""
        return [f"({one.url})" if one.leaving else one.url for one in self.lists[-1]]

    async def until(self, urls: Sequence[str], seconds: float = 5.0) -> None:
        await self.until_it_is(lambda: self.urls == list(urls), seconds)

    async def until_it_is(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not (self.lists and condition()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"told {self.lists[-1:]}, all: {len(self.lists)}") from None


@asynccontextmanager
async def following(source: Source | str) -> AsyncIterator[Heard]:
    """It must be going on until the end, and then end at once."""
    assert not isinstance(source, str), source
    heard = Heard()
    task = asyncio.create_task(source.follow(heard.tell))
    try:
        yield heard
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled(), "it did not end when it was cancelled"

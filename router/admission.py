"""How many requests the engines of a pool get at a time; what is beyond waits here, by priority, or is refused.

A turn is let into the decode pool before its prefill leg begins: KV that has been computed for it is under a lease, and
must not wait for room. The prefill pool is entered for the prefill leg only. Always in this order, so that no two turns
wait for each other.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from connectors.wire.openai import APIError, unavailable
from router.member import Engine, Role

RETRY_AFTER_SECONDS: Final = 1
FEW: Final = 16
"""That are no longer waiting, to be put up with among those that are."""


@dataclass(slots=True, order=True)
class _Waiting:
    priority: int
    number: int
    future: asyncio.Future[None] = field(compare=False)


class Gate:
    """One pool's. Its size follows the engines that take turns."""

    def __init__(
        self, role: Role, engines: Callable[[], tuple[Engine, ...]], *, per_engine: int | None, most_waiting: int
    ) -> None:
        """`per_engine`: requests of this router's at a time; None: any number, and nobody waits."""
        self.per_engine = per_engine
        self.num_inside = 0
        self.num_waiting = 0
        self._role = role
        self._engines = engines
        self._most_waiting = most_waiting
        self._waiting: list[_Waiting] = []
        """Those included that have gone, until they are first."""
        self._number = 0

    @property
    def room(self) -> int:
        """How many requests may be inside. One at least: what there is no engine for finds out by itself."""
        assert self.per_engine is not None
        return max(1, self.per_engine * sum(engine.ready for engine in self._engines()))

    def enter_freely(self) -> bool:
        """Where there is no limit: come in, as by `enter`."""
        if self.per_engine is not None:
            return False
        self.num_inside += 1
        return True

    async def enter(self, priority: int, due: float) -> bool:
        """Wait for room until `due` (event loop time), and whether that was necessary; `leave` when done. Of those that
        wait the lowest priority goes first, then who came first. Raises APIError: 503 if too many wait, or it took too
        long."""
        if self.per_engine is None or (not self.num_waiting and self.num_inside < self.room):
            self.num_inside += 1
            return False
        if self.num_waiting >= self._most_waiting:
            raise self._full("too many requests wait for it")
        loop = asyncio.get_running_loop()
        self._number += 1
        waiting = _Waiting(priority, self._number, loop.create_future())
        heapq.heappush(self._waiting, waiting)
        self.num_waiting += 1
        try:
            async with asyncio.timeout_at(due):
                await waiting.future
        except BaseException as error:
            if waiting.future.done() and not waiting.future.cancelled():
                self.leave()  # it was let in just then
            elif len(self._waiting) > 2 * self.num_waiting + FEW:
                self._waiting = [one for one in self._waiting if not one.future.done()]
                heapq.heapify(self._waiting)
            if isinstance(error, TimeoutError):
                raise self._full("it took too long to have room") from None
            raise
        finally:
            self.num_waiting -= 1
        return True

    def leave(self) -> None:
        self.num_inside -= 1
        if self._waiting:
            self.let_in()

    def let_in(self) -> None:
        """As many as there is room for; also to be called when an engine has become ready."""
        if self.per_engine is None:
            return
        while self._waiting:
            if self._waiting[0].future.done():
                heapq.heappop(self._waiting)
                continue
            if self.num_inside >= self.room:
                return
            heapq.heappop(self._waiting).future.set_result(None)
            self.num_inside += 1

    def _full(self, why: str) -> APIError:
        return unavailable(
            f"The {self._role} pool is full: {why}. Try again in a moment.", retry_after=RETRY_AFTER_SECONDS
        )

"""A peer's HTTP exchanges, one after the other, in a thread of their own: a peer that hangs delays nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from connectors.peer import PeerClient, PeerError, PeerUnreachable

MAX_QUEUED = 1024
"""Exchanges waiting at most; more are answered as unreachable at once."""

T = TypeVar("T")


class Lane:
    """Owned by one thread, which alone calls `call` and `close`. Answers are given on the lane's thread."""

    def __init__(self, host: str, port: int) -> None:
        self._client = PeerClient(host, port)
        self._broken_off = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"peer-{host}:{port}", daemon=True)
        self._thread.start()

    def call(
        self, exchange: Callable[[PeerClient, float], T], timeout: float, answer: Callable[[T | PeerError], None]
    ) -> None:
        """Run `exchange(client, deadline)` and hand its result, or how it failed, to `answer`.

        The deadline counts from now: exchanges that queue behind one that hangs fail together with it.
        """
        deadline = time.monotonic() + timeout

        def run() -> None:
            try:
                if self._broken_off:
                    raise PeerUnreachable("broken off")
                result: T | PeerError = exchange(self._client, deadline)
            except PeerError as error:
                result = error
            answer(result)

        if self._calls.qsize() >= MAX_QUEUED:
            answer(PeerUnreachable(f"{MAX_QUEUED} exchanges with this peer are waiting"))
        else:
            self._calls.put(run)

    def close(self) -> None:
        """Take no more calls; those already queued still run. Returns at once."""
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        """After close: wait for the queued calls, but no longer than `timeout` seconds; then break them off."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._broken_off = True
            self._client.abort()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        self._client.close()

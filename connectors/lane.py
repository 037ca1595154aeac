"""A peer's HTTP exchanges, one after the other, in a thread of their own: a peer that hangs delays nobody else."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from connectors.peer import PeerClient, PeerError, PeerUnreachable, Service

logger = logging.getLogger(__name__)

MAX_QUEUED = 1024
"""Exchanges waiting at most; more are answered as unreachable at once."""
IDLE_SECONDS = 30.0
"""Without an exchange for this long, the connection is closed and the thread ends; the next call starts another."""

T = TypeVar("T")


class Lane:
    """Owned by one thread, which alone calls `call` and `close`. Answers are given on the lane's thread."""

    def __init__(self, host: str, port: int, service: Service = "kv") -> None:
        self._client = PeerClient(host, port, service)
        self._name = f"peer-{host}:{port}"
        self._broken_off = False
        self._closed = False
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        """The first one stays in while it runs."""
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether no exchange is under way or waits."""
        with self._changed:
            return not self._calls

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
            except Exception as error:  # or nobody would be answered here any more, and this one never
                logger.exception("an exchange with a peer failed")
                result = PeerError(f"{type(error).__name__}: {error}")
            answer(result)

        with self._changed:
            full = len(self._calls) > MAX_QUEUED
            if not full and not self._closed:
                self._calls.append(run)
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                return
        answer(PeerUnreachable(f"{MAX_QUEUED} exchanges with this peer are waiting" if full else "closed"))

    def close(self) -> None:
        """Take no more calls; those already queued still run. Returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """After close: wait for the queued calls, but no longer than `timeout` seconds; then break them off."""
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            self._broken_off = True
            self._client.abort()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            finally:
                with self._changed:
                    self._calls.popleft()

    def _next(self) -> Callable[[], None] | None:
        """The next call, or None when this thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed, IDLE_SECONDS)
            if self._calls:
                return self._calls[0]
            # Before another thread can use the client.
            self._client.close()
            self._thread = None
            return None

"""The HTTP thread of a worker: an asyncio loop beside the engine, which has the main thread.

The port is bound before anything else happens, so that a taken one is an error at once and the model is not loaded
in vain.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop
from aiohttp import web

from engine.errors import StartError

logger = logging.getLogger(__name__)

BACKLOG = 1024
START_TIMEOUT = 10.0
SHUTDOWN_TIMEOUT = 3.0
"""Seconds open connections get to end once the server stops."""


def bind(host: str, port: int, setting: str = "--port") -> socket.socket:
    """Return a socket listening on host:port (0 takes a free one). Raises StartError, which names the `setting`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} on {host} is already in use: choose another with {setting}") from None
        reason = error.strerror or str(error)
        raise StartError(f"cannot listen on {host}:{port}: {reason}; check --host and {setting}") from None


class HTTPServer:
    """Serves an application from its own thread until stopped."""

    def __init__(self, app: web.Application, *socks: socket.socket) -> None:
        """All of it is served on each of these, from `bind`."""
        self._app = app
        self._socks = socks
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._started = threading.Event()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Return once requests are answered."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT):
            raise RuntimeError("the HTTP thread did not start")

    def call(self, action: Callable[[], object]) -> None:
        """Run `action` on the loop soon; from any thread, also from a signal handler."""
        self.loop.call_soon_threadsafe(action)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop; from any thread. The server's end cancels it."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        """Close connections and end the thread; returns when it has ended."""
        if self._thread.is_alive():
            self.call(self._stopping.set)
            self._thread.join(SHUTDOWN_TIMEOUT + START_TIMEOUT)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
            self.loop.run_until_complete(_cancel_rest())
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        # handler_cancellation is off by default: without it a client that leaves keeps its request running.
        runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT)
        await runner.setup()
        try:
            for sock in self._socks:
                await web.SockSite(runner, sock, backlog=BACKLOG).start()
            self._started.set()
            await self._stopping.wait()
        finally:
            await runner.cleanup()


async def _cancel_rest() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

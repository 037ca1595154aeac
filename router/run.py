"""One router process: from its settings to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson
import uvloop
from aiohttp import web

from router.app import build_admin_app, build_app
from router.config import RouterConfig
from router.context import ROUTER, Router

CUT_SECONDS: Final = 1.0  # for what did not end while draining
GC_THRESHOLD: Final = 10_000  # objects; turns leave hardly any cycles behind, and most of what they make is soon gone

log = logging.getLogger("router")


def run_router(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the process's exit code. Logging is the caller's to set up."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config))


def make_runner(config: RouterConfig) -> web.AppRunner:
    return web.AppRunner(
        build_app(config),
        handler_cancellation=True,  # a client that leaves ends its turn, in whatever phase
        auto_decompress=False,  # its refusal of an unknown encoding could not be ours
        access_log=None,
        shutdown_timeout=CUT_SECONDS,
    )


async def serve(config: RouterConfig) -> int:
    try:
        runner = make_runner(config)
    except ValueError as error:
        print(f"backhaul router: {error}", file=sys.stderr)
        return 1
    stop = _Signals()
    await runner.setup()
    admin = web.AppRunner(build_admin_app(runner.app[ROUTER]), access_log=None, shutdown_timeout=CUT_SECONDS)
    try:
        site = web.TCPSite(runner, config.host, config.port, reuse_address=True)
        if stop.pending:
            return 0
        try:
            await site.start()
        except OSError as error:
            _cannot_listen(config.host, config.port, "", error)
            return 1
        url = _url(config.host, runner)
        if not await _listen_for_operators(config, admin):
            return 1
        log.info("listening", extra={"url": url, "prefill": len(config.prefill), "decode": len(config.decode)})
        if config.json_file is not None:
            _write_atomically(config.json_file, orjson.dumps({"url": url, "pid": os.getpid()}))
        gc.freeze()  # what is there now stays
        gc.enable()
        gc.set_threshold(GC_THRESHOLD)
        await stop.next()
        await drain(runner.app[ROUTER], site, config, stop)
        return 0
    finally:
        await admin.cleanup()
        await runner.cleanup()
        stop.close()


async def drain(router: Router, site: web.TCPSite, config: RouterConfig, stop: _Signals) -> None:
    """Say that we go, still serve for a while, then let what runs end. A second signal skips the waiting.

    Ctrl-C does not wait for load balancers: there is none.
    """
    delay = config.drain_delay if stop.last == signal.SIGTERM else 0.0
    log.info("draining", extra={"seconds": delay})
    router.draining = True
    await _unless(stop.next(), asyncio.sleep(delay))
    await site.stop()
    await _unless(stop.next(), asyncio.wait_for(router.turns.end(), config.drain_timeout))
    if router.turns.count:
        log.warning("turns cut off: they did not end in time", extra={"turns": router.turns.count})


async def _unless(interruption: Awaitable[None], work: Awaitable[None]) -> None:
    """Wait for the work, or until interrupted; the work is cancelled then."""
    tasks = [asyncio.ensure_future(interruption), asyncio.ensure_future(work)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, TimeoutError):
                await task


class _Signals:
    """SIGTERM and SIGINT, one after the other; caught from the start, so that also an early one ends us cleanly."""

    def __init__(self) -> None:
        self.last: signal.Signals | None = None
        self._loop = asyncio.get_running_loop()
        self._seen = asyncio.Semaphore(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._see, number)

    @property
    def pending(self) -> bool:
        return not self._seen.locked()

    async def next(self) -> None:
        await self._seen.acquire()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _see(self, number: signal.Signals) -> None:
        self.last = number
        self._seen.release()


async def _listen_for_operators(config: RouterConfig, admin: web.AppRunner) -> bool:
    if config.admin_port is None:
        return True
    await admin.setup()
    try:
        await web.TCPSite(admin, config.admin_host, config.admin_port, reuse_address=True).start()
    except OSError as error:
        _cannot_listen(config.admin_host, config.admin_port, "admin-", error)
        return False
    log.info("listening for operators", extra={"url": _url(config.admin_host, admin)})
    return True


def _cannot_listen(host: str, port: int, which: str, error: OSError) -> None:
    print(
        f"backhaul router: cannot listen on {host}:{port}: {error.strerror or error}. "
        f"Choose another --{which}port or --{which}host.",
        file=sys.stderr,
    )


def _url(host: str, runner: web.AppRunner) -> str:
    port = runner.addresses[0][1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_atomically(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)

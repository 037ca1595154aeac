"""A router, of one process or several: from its settings to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

import orjson
import uvloop
from aiohttp import web

from router.app import check_settings, clients_runner, open_router, operators_runner
from router.config import RouterConfig
from router.context import Router
from router.processes import Processes

GC_THRESHOLD: Final = 10_000  # objects; turns leave hardly any cycles behind, and most of what they make is soon gone

log = logging.getLogger("router")


def run_router(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the process's exit code. Logging is the caller's to set up."""
    if config.json_file is not None and not os.access(config.json_file.parent, os.W_OK | os.X_OK):
        print(f"backhaul router: --json-file {config.json_file}: its folder cannot be written to", file=sys.stderr)
        return 1
    if config.processes > 1:
        return run_processes(config)
    return run_process(config)


def run_process(config: RouterConfig, channel: socket.socket | None = None) -> int:
    """`channel` leads to the parent of a router's processes, if this is one of several."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, channel))


def run_processes(config: RouterConfig) -> int:
    """What is wrong with the settings is said once, by the parent; ports are chosen, and kept, by it."""
    try:
        check_settings(config)
    except ValueError as error:
        print(f"backhaul router: {error}", file=sys.stderr)
        return 1
    with ExitStack() as kept:
        ports: dict[str, int] = {}
        for which, host, port in (("", config.host, config.port), ("admin_", config.admin_host, config.admin_port)):
            if port is not None:
                try:
                    ports[f"{which}port"] = kept.enter_context(reserved(host, port)).getsockname()[1]
                except OSError as error:
                    _cannot_listen(host, port, which.replace("_", "-"), error)
                    return 1
        theirs = config.model_copy(update={**ports, "json_file": None})
        url = _url_of(config.host, ports["port"])

        def listening() -> None:
            log.info("all processes listen", extra={"url": url, "processes": config.processes})
            if config.json_file is not None:
                operators = _url_of(config.admin_host, ports["admin_port"]) if "admin_port" in ports else None
                _write_facts(config.json_file, url, operators)

        gc.freeze()  # what is there now stays, and is the same for all processes
        gc.enable()
        return Processes(config.processes, partial(run_process, theirs), listening=listening).run()


def reserved(host: str, port: int) -> socket.socket:
    """A socket that keeps a port for our processes, and does not listen. Raises OSError if others have it."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:  # one that shares would not notice who shares as well
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        address = probe.getsockname()
    keeper = socket.socket(family, kind, protocol)
    try:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(address)
    except OSError:
        keeper.close()
        raise
    return keeper


async def serve(config: RouterConfig, channel: socket.socket | None = None) -> int:
    stop = _Signals()
    async with AsyncExitStack() as opened:
        opened.callback(stop.close)
        try:
            router = await opened.enter_async_context(open_router(config))
        except ValueError as error:  # a key that is none, or where engines come from can never be asked
            print(f"backhaul router: {error}", file=sys.stderr)
            return 1
        clients, operators = clients_runner(router), operators_runner(router)
        opened.push_async_callback(clients.cleanup)
        opened.push_async_callback(operators.cleanup)
        await clients.setup()
        several = channel is not None
        if channel is not None:
            await router.siblings.connect(channel, stop.orphaned)
            await _know_engines(router, config.probe_timeout)
        site = web.TCPSite(clients, config.host, config.port, reuse_address=True, reuse_port=several)
        if stop.pending:
            return 0
        try:
            await site.start()
        except OSError as error:
            _cannot_listen(config.host, config.port, "", error)
            return 1
        url = _url(config.host, clients)
        if not await _listen_for_operators(config, operators, several):
            return 1
        router.siblings.listens()
        log.info("listening", extra={"url": url, "prefill": len(config.prefill), "decode": len(config.decode)})
        if config.json_file is not None:
            _write_facts(config.json_file, url, _url(config.admin_host, operators) if operators.addresses else None)
        gc.freeze()  # what is there now stays
        gc.enable()
        gc.set_threshold(GC_THRESHOLD)
        await stop.next()
        await drain(router, site, config, stop)
        return 0


async def _know_engines(router: Router, seconds: float) -> None:
    """Until there is one of each role that may be given turns, or so long. One of several processes gets connections as
    soon as it listens, whatever it says at /ready."""
    changed = asyncio.Event()
    router.pool.on_change.append(changed.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not all(router.pool.is_up(role) for role in ("prefill", "decode") if router.pool.has(role)):
                changed.clear()
                await changed.wait()
    router.pool.on_change.remove(changed.set)


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

    def orphaned(self) -> None:
        """The parent of this process is no longer there, and cannot pass any signal on."""
        self._see(signal.SIGTERM)

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _see(self, number: signal.Signals) -> None:
        self.last = number
        self._seen.release()


async def _listen_for_operators(config: RouterConfig, operators: web.ServerRunner, several: bool) -> bool:
    if config.admin_port is None:
        return True
    await operators.setup()
    try:
        site = web.TCPSite(operators, config.admin_host, config.admin_port, reuse_address=True, reuse_port=several)
        await site.start()
    except OSError as error:
        _cannot_listen(config.admin_host, config.admin_port, "admin-", error)
        return False
    log.info("listening for operators", extra={"url": _url(config.admin_host, operators)})
    return True


def _cannot_listen(host: str, port: int, which: str, error: OSError) -> None:
    print(
        f"backhaul router: cannot listen on {host}:{port}: {error.strerror or error}. "
        f"Choose another --{which}port or --{which}host.",
        file=sys.stderr,
    )


def _url(host: str, runner: web.ServerRunner) -> str:
    return _url_of(host, runner.addresses[0][1])


def _url_of(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_facts(path: Path, url: str, operators: str | None) -> None:
    """Where it listens, for clients and for operators."""
    data = orjson.dumps({"url": url, "pid": os.getpid()} | ({} if operators is None else {"operators_url": operators}))
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)

"""`backhaul engine`: serve until told to stop; what goes wrong is one line on stderr and an exit code."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from engine.address import advertised_host, is_loopback, side_channel
from engine.api.context import Worker
from engine.app import make_app
from engine.config import EngineConfig
from engine.drain import drain_when_told
from engine.errors import StartError
from engine.model.errors import ModelError
from engine.server import HTTPServer, bind

if TYPE_CHECKING:
    from engine.assemble import Engine

logger = logging.getLogger(__name__)


def run_engine(config: EngineConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code of the process, which this must be alone in."""
    signals = _Signals()
    signals.install()
    host = advertised_host(config)
    if config.require_routable_host and is_loopback(host):
        print(
            f"backhaul engine: --require-routable-host: peers on other machines cannot reach {host}; "
            "give --advertise-host this machine's own address",
            file=sys.stderr,
        )
        return 2
    try:
        if config.json_file is not None:
            _clear(config.json_file)
        sock = bind(config.host, config.port)
        port = sock.getsockname()[1]
        socks = [sock]
        if config.ec_transfer_enabled and config.announces_encodings:
            _, side_port = side_channel(config, host, port)
            if side_port != port:
                socks.append(bind(config.host, side_port, "--ec-transfer-config.ec-port"))
    except StartError as error:
        return _cannot_start(error)
    worker = Worker(config)
    server = HTTPServer(make_app(worker), *socks)
    server.start()
    try:
        # Only now: torch takes seconds to import, which a taken port should not cost, and health checks are answered.
        from engine.assemble import assemble

        gc.freeze()  # what importing has made stays
        gc.enable()
        engine = assemble(config, server, port, on_failure=lambda reason: server.call(lambda: worker.fail(reason)))
        server.spawn(drain_when_told(worker, engine.serving))
        signals.first = lambda: server.call(worker.leaving.set)
        worker.serving = engine.serving
        if config.json_file is not None:
            _write_facts(config.json_file, config, engine.serving.model_name, port)
    except (StartError, ModelError) as error:
        server.stop()
        return _cannot_start(error)
    except Exception as error:  # not foreseen, but no reason to show a user a traceback either
        server.stop()
        return _cannot_start(f"{type(error).__name__}: {error}", error)
    return _serve(engine, worker, server)


def _serve(engine: Engine, worker: Worker, server: HTTPServer) -> int:
    from engine.core import EngineFailed

    try:
        engine.core.run()
    except EngineFailed as error:
        print(f"backhaul engine: {error}", file=sys.stderr)
        return 1
    finally:
        server.stop()
    if worker.failure is not None:
        print(f"backhaul engine: {worker.failure}", file=sys.stderr)
        return 1
    logger.info("engine stopped")
    return 0


class _Signals:
    """While starting, a signal ends the process: nobody is served yet. Then the first drains, the second ends it."""

    def __init__(self) -> None:
        self.first: Callable[[], None] | None = None
        self._received = False

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            os._exit(0)
        if self._received:
            os._exit(128 + number)
        self._received = True
        self.first()


def _clear(path: Path) -> None:
    """Remove what an earlier run left, so that the file's appearance means this engine is ready."""
    if not os.access(path.parent, os.W_OK):
        raise StartError(f"--json-file {path}: the folder is missing or cannot be written to")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartError(f"--json-file {path} cannot be replaced: {error.strerror}") from None


def _write_facts(path: Path, config: EngineConfig, model: str, port: int) -> None:
    """Tell a script where the engine is; the file appears whole or not at all."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    facts = {"url": url, "role": config.role, "pid": os.getpid(), "model": model}
    try:
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(facts))
        os.replace(scratch, path)
    except OSError as error:
        raise StartError(f"--json-file {path} cannot be written: {error.strerror}") from None


def _cannot_start(reason: object, cause: BaseException | None = None) -> int:
    if cause is not None:
        logger.debug("why the engine does not start", exc_info=cause)
    print("backhaul engine:", " ".join(str(reason).split()), file=sys.stderr)
    return 1

"""`backhaul up`: the whole product on one machine, for a developer's laptop or a script."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from backhaul import models
from backhaul.display import Display, open_display
from backhaul.errors import CommandError
from backhaul.extras import require
from backhaul.settings import Settings
from backhaul.snippets import announcement
from backhaul.stack import EngineSpec, Running, Stack
from backhaul.valkey import find_server

Positive = Annotated[int, Field(ge=1)]


class UpConfig(Settings):
    """Start Valkey, prefill, decode and encode engines and the router on this machine, until Ctrl-C."""

    model: str | None = None
    """A GGUF file or a Hugging Face folder; default: SmolLM2-135M-Instruct, fetched once."""
    host: str = "127.0.0.1"
    """Address the router listens on; everything else stays on loopback."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port the router listens on; 0 takes a free one."""
    prefill: Positive = 1
    """Number of prefill engines."""
    decode: Positive = 1
    """Number of decode engines."""
    encoder: Annotated[int, Field(ge=0, json_schema_extra={"bare": 1})] = 0
    """Number of encode engines, for a model that sees pictures; --encoder alone: 1."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. auto: bfloat16 on a GPU that has it and on a CPU with AMX, else float32."""
    max_model_len: Positive | None = None
    """Longest prompt plus output, in tokens; default: the model's own limit."""
    served_model_name: str | None = None
    """Model name in the API; default: the model's own."""
    threads: Positive | None = None
    """Compute threads per engine; default: the cores of this machine, shared out."""
    json_file: Annotated[Path | None, Field(alias="json")] = None
    """Write base URL, model name, URLs and process ids here once everything is ready."""
    log_dir: Path | None = None
    """Keep the parts' logs here; default: a temporary folder that stays only after a failure."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the parts' logs."""
    start_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds until everything must be ready; fetching the model does not count."""


def run_up(config: UpConfig) -> int:
    """Run until SIGINT or SIGTERM. Raises CommandError when a part is missing, does not start, or dies."""
    require("engine", "embedded", command="up")
    find_server()
    if config.model is not None and not _absolute(config.model).exists():
        raise CommandError(f"--model {config.model}: no such file or folder; give a GGUF file or a Hugging Face folder")
    _check_port(config.host, config.port)
    if config.encoder and config.model is None:
        raise CommandError("--encoder: needs a model that sees pictures; give its Hugging Face folder with --model")
    if config.json_file is not None:
        config.json_file.unlink(missing_ok=True)
    with _folders(config) as (folder, logs):
        asyncio.run(_serve(config, folder, logs))
    return 0


async def _serve(config: UpConfig, folder: Path, logs: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    async with Stack(folder, logs, stop, log_level=config.log_level) as stack:
        with open_display() as display:
            running = await stack.until(_start(config, stack, display))
        if running is None:
            return
        _announce(config, running)
        await stack.until(stop.wait())
        print("Stopping.", file=sys.stderr, flush=True)


async def _start(config: UpConfig, stack: Stack, display: Display) -> Running:
    name = config.served_model_name
    if config.model is None:
        model = await models.fetch(models.DEFAULT_MODEL, models.models_folder(), display)
        name = name or models.DEFAULT_MODEL.name
    else:
        model = _absolute(config.model)
    num_engines = config.prefill + config.decode + config.encoder
    # Engines share the cores: with more compute threads than cores they spend their time waiting for each other.
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // num_engines)
    flags = ["--model", str(model), "--dtype", config.dtype, "--threads", str(threads)]
    if config.max_model_len is not None:
        flags += ["--max-model-len", str(config.max_model_len)]
    if name is not None:
        flags += ["--served-model-name", name]
    engines = [EngineSpec(name, role, flags) for role, name in _engine_names(config)]
    router = ["--host", config.host, "--port", str(config.port)]
    return await stack.start(engines, router, display, within=config.start_timeout)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _engine_names(config: UpConfig) -> Iterator[tuple[str, str]]:
    for role, count in (("prefill", config.prefill), ("decode", config.decode), ("encode", config.encoder)):
        for number in range(1, count + 1):
            yield role, role if count == 1 else f"{role}-{number}"


def _announce(config: UpConfig, running: Running) -> None:
    print(announcement(running.base_url, running.model, running.page_url, sees=config.encoder > 0), flush=True)
    if not _compiler():
        print("Note: no C++ compiler here: the engines use torch alone, which is slower. Install g++.", file=sys.stderr)
    if config.json_file is not None:
        _write_whole(config.json_file, json.dumps(running.to_json(), indent=2) + "\n")


def _compiler() -> str | None:
    """The compiler the engine would build its CPU kernels with."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


def _check_port(host: str, port: int) -> None:
    """Say at once what would otherwise show only after the model has been loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        raise CommandError(f"--host {host}: no such address on this machine") from None
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = (
            "choose another with --port, or 0 for a free one" if taken else "give an address of this machine as --host"
        )
        raise CommandError(f"cannot listen on {host} port {port} ({error.strerror}); {advice}") from None


@contextmanager
def _folders(config: UpConfig) -> Iterator[tuple[Path, Path]]:
    """The parts' own files, and their logs. Kept after a failure, for someone to look into."""
    folder = Path(tempfile.mkdtemp(prefix="backhaul-"))
    logs = (config.log_dir or folder).absolute()
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--log-dir {logs}: {error.strerror}") from None
    yield folder, logs
    shutil.rmtree(folder, ignore_errors=True)


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half-written, and that only this user can read: it has the store's password."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        raise CommandError(f"--json {path}: {error.strerror}") from None

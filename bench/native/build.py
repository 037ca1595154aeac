"""Compile the benchmark's C programs, once, into the user's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

Program = Literal["stub_engine", "load"]

HERE: Final = Path(__file__).parent
FLAGS: Final = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
COMPILE_TIMEOUT: Final = 60.0


class BuildError(Exception):
    """The programs cannot be had on this machine; the message says why."""


def compiler() -> str | None:
    """The C compiler: it comes with the C++ compiler that the engine's kernels need."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")


def build(program: Program, folder: Path | None = None, *flags: str) -> Path:
    """The program, compiled into `folder` (the cache) unless it is there; raises BuildError."""
    command = compiler()
    if command is None:
        raise BuildError("no C compiler found (install gcc)")
    folder = folder or cache_folder()
    source, shared = HERE / f"{program}.c", HERE / "net.h"
    digest = blake2b(digest_size=8)
    for part in (source.read_bytes(), shared.read_bytes(), command.encode(), " ".join((*FLAGS, *flags)).encode()):
        digest.update(part)
    binary = folder / f"{program}-{digest.hexdigest()}"
    if binary.exists():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        made = Path(scratch) / program
        done = subprocess.run(
            [command, *FLAGS, *flags, str(source), "-o", str(made)],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMPILE_TIMEOUT,
        )
        if done.returncode != 0:
            raise BuildError(f"{command}: {done.stderr.strip()}")
        os.replace(made, binary)  # atomic: two runs may have started together
    return binary


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "backhaul" / "bench"

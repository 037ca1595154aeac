"""Prometheus and promtool: those that are installed, or Debian's package, unpacked once into the user's cache.

apt checks what it downloads by Debian's signatures. `python -m deploy.prometheus` prints where they are.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from deploy.tools import CACHE, DOWNLOAD_SECONDS, Unavailable

PACKAGE: Final = "prometheus"
FOLDER: Final = CACHE / PACKAGE


@functools.cache
def prometheus() -> Path:
    """Raises Unavailable."""
    return _program("prometheus")


@functools.cache
def promtool() -> Path:
    """Raises Unavailable."""
    return _program("promtool")


def _program(name: str) -> Path:
    if (installed := shutil.which(name)) is not None:
        return Path(installed)
    if not FOLDER.exists():
        _unpack(FOLDER)
    program = FOLDER / "usr/bin" / name
    run = subprocess.run([program, "--version"], capture_output=True, text=True)
    if run.returncode != 0:
        raise Unavailable(f"Debian's {name} does not run here: {run.stderr.strip()}")
    return program


def _unpack(target: Path) -> None:
    """Whole, or not at all."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable(f"{PACKAGE} is not installed, and there is no apt-get to fetch it with")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        command = ["apt-get", "download", PACKAGE]
        try:
            subprocess.run(command, cwd=name, check=True, capture_output=True, timeout=DOWNLOAD_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            raise Unavailable(f"{PACKAGE} is not installed, and apt-get download does not get it: {error}") from None
        root = Path(name) / "root"
        for package in Path(name).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, root], check=True, capture_output=True)
        if not target.exists():
            root.rename(target)


if __name__ == "__main__":
    for file in (prometheus(), promtool()):
        print(file)

"""A headless Chromium for the tests of the status page: the system's, or the one in tests/page/node_modules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE / "node_modules/@sparticuz/chromium"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "backhaul/chromium"


class Unavailable(Exception):
    """Why there is no browser here."""


@dataclass(frozen=True)
class Chromium:
    path: Path
    env: dict[str, str]


def find_chromium() -> Chromium:
    """Raises Unavailable."""
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return Chromium(Path(found), {})
    if not PACKAGE.is_dir():
        raise Unavailable("no Chromium: install one, or `make clients` with node and npm")
    folder = CACHE / json.loads((PACKAGE / "package.json").read_text())["version"]
    if not (folder / "chromium").is_file():
        run = subprocess.run(["node", str(HERE / "unpack.mjs"), str(folder)], capture_output=True, text=True)
        if run.returncode:
            raise Unavailable(f"Chromium cannot be unpacked: {run.stderr.strip()[-300:]}")
    return Chromium(folder / "chromium", _libraries(folder))


def _libraries(folder: Path) -> dict[str, str]:
    """Where those are that this system lacks, which come with it."""
    run = subprocess.run(["ldd", str(folder / "chromium")], capture_output=True, text=True)
    if "not found" not in run.stdout:
        return {}
    if not (folder / "lib").is_dir():
        with tarfile.open(folder / "al2023.tar") as tar:
            tar.extractall(folder, filter="data")
    return {"LD_LIBRARY_PATH": str(folder / "lib")}

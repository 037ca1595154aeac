"""Debian's haproxy in front of routers, as a part of the fleet: the one that is installed, or its packages unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.parts import Part
from tests.valkey import free_port

PACKAGES = ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")
"""With the libraries that a small system lacks."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "backhaul/haproxy"
DOWNLOAD_SECONDS = 60
CONFIG = """\
defaults
    mode http
    timeout connect 2s
    timeout client 120s
    timeout server 120s
    option httpchk GET /ready
    option redispatch
    retries 3
    default-server check inter 200ms fall 1 rise 1

frontend door
    bind 127.0.0.1:{port}
    default_backend routers

backend routers
    balance leastconn
{servers}
"""
"""Every setting that matters is the default or plain: health by /ready, and what could not be sent goes elsewhere."""


class Unavailable(Exception):
    """Why there is no haproxy here."""


def haproxy(folder: Path, routers: Sequence[Part]) -> Part:
    """Raises Unavailable."""
    binary, libraries = _binary()
    port, file = free_port(), folder / "haproxy.cfg"
    servers = [f"    server router{number} 127.0.0.1:{router.port}" for number, router in enumerate(routers)]
    file.write_text(CONFIG.format(port=port, servers="\n".join(servers)))
    environment = {"LD_LIBRARY_PATH": str(libraries)} if libraries is not None else {}
    command = [str(binary), "-db", "-f", str(file)]
    return Part("haproxy", "balancer", command, port, folder, "/ready", environment=environment, is_ours=False)


def _binary() -> tuple[Path, Path | None]:
    """The program, and where its libraries are if not where the system has them."""
    if (installed := shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")) is not None:
        return Path(installed), None
    if not (CACHE / "usr/sbin/haproxy").exists():
        _unpack(CACHE)
    libraries = next((CACHE / "usr/lib").glob("*-linux-gnu"))
    program = CACHE / "usr/sbin/haproxy"
    run = subprocess.run([program, "-v"], env={"LD_LIBRARY_PATH": str(libraries)}, capture_output=True, text=True)
    if run.returncode != 0:
        raise Unavailable(f"Debian's haproxy does not run here: {run.stderr.strip()}")
    return program, libraries


def _unpack(target: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable("haproxy is not installed, and there is no apt-get to fetch it with")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        try:
            subprocess.run(
                ["apt-get", "download", *PACKAGES], cwd=name, check=True, capture_output=True, timeout=DOWNLOAD_SECONDS
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise Unavailable(f"haproxy is not installed, and apt-get download does not get it: {error}") from None
        root = Path(name) / "root"
        for package in Path(name).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, root], check=True, capture_output=True)
        if not target.exists():
            root.rename(target)

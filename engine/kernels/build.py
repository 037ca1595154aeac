"""Compile the C++ kernels for this machine, once, with the system's compiler.

They link to no OpenMP runtime of their own: they use the one torch has loaded, so that both share one team of threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

import torch

from engine.kernels.library import Kernels

logger = logging.getLogger(__name__)

SOURCES = ("attention.cpp", "decoder.cpp", "elementwise.cpp", "linear.cpp", "prefill.cpp")
HEADERS = ("cache.h", "float_product.h", "integer_product.h", "linear.h", "simd.h", "weights.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-fvisibility=default")
COMPILE_TIMEOUT = 300.0
"""Seconds for one file; it takes up to ten, and far longer where every core has other work."""


class BuildError(Exception):
    """The kernels cannot be had on this machine; the message says why."""


@functools.cache
def load_kernels() -> Kernels | None:
    """The compiled kernels, or None where there is no compiler for them (logged): torch does their work then."""
    started = time.monotonic()
    try:
        openmp = ctypes.CDLL(str(_openmp_runtime()), ctypes.RTLD_GLOBAL)  # global: the kernels take their calls from it
        kernels = Kernels(ctypes.CDLL(str(build(cache_folder()))), openmp)
    except (BuildError, OSError, AttributeError) as error:
        logger.warning("cpu kernels are not available, falling back to torch (several times slower): %s", error)
        return None
    logger.info("cpu kernels loaded in %.1f s", time.monotonic() - started)
    return kernels


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "backhaul" / "kernels"


def build(folder: Path) -> Path:
    """The shared library, compiled into `folder` unless it is there; raises BuildError."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler found (install g++)")
    library = folder / f"kernels-{_identity(compiler)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder, prefix="build-")
    except OSError as error:
        raise BuildError(f"{folder} is not writable: {error.strerror}") from error
    with scratch as name:
        objects = [Path(name) / f"{Path(source).stem}.o" for source in SOURCES]
        commands = [
            [compiler, *FLAGS, "-c", str(_here() / source), "-o", str(target)]
            for source, target in zip(SOURCES, objects, strict=True)
        ]
        # Linked without -fopenmp, which would bring in a second OpenMP runtime.
        linked = Path(name) / library.name
        commands.append([compiler, "-shared", *map(str, objects), "-o", str(linked)])
        for command in commands:
            _run(command)
        os.replace(linked, library)  # atomic: engines starting together may all have compiled it
    return library


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        raise BuildError(f"{command[0]}: {next((line for line in lines if 'error' in line), 'failed')}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error


def _here() -> Path:
    return Path(__file__).parent


def _identity(compiler: str) -> str:
    """Names what the library depends on: sources, flags, compiler and the instructions this CPU knows."""
    digest = blake2b(digest_size=8)
    for source in (*SOURCES, *HEADERS):
        digest.update((_here() / source).read_bytes())
    digest.update(" ".join((compiler, *FLAGS)).encode())
    digest.update(str(Path(compiler).resolve().stat().st_mtime_ns).encode())
    digest.update(_cpu().encode())
    return digest.hexdigest()


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE))))


def _openmp_runtime() -> Path:
    """The OpenMP library this process has loaded (torch's), under whatever name it was packaged."""
    torch.get_num_threads()
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise BuildError(f"cannot tell which OpenMP runtime torch uses on {platform.system()}") from error
    found = re.search(r"/\S*/lib(?:gomp|iomp5|omp)\b\S*", maps)
    if found is None:
        raise BuildError("this build of torch does not use OpenMP")
    return Path(found[0])

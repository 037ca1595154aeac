"""`make lock`: writes the exact versions and hashes that images are made of. `check` compares them, without a network,
with what pyproject.toml allows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
DOCKER: Final = ROOT / "deploy/docker"
PYTHON: Final = "3.12"
"""Of the images."""
OF_TORCH: Final = ("torch", "triton", "nvidia-", "cuda-")
"""Not in the lock: their builds differ by the device, and torch names exact versions of what it needs."""
CUDA: Final = ("nvidia-cuda-runtime-cu12>=12.6,<13",)
"""What NIXL's bindings for CUDA 12 load beside the driver."""
HEADER: Final = "# Made by `make lock`, of pyproject.toml.\n"


def project() -> Mapping[str, list[Requirement]]:
    """What pyproject.toml asks for, by the name of the lock."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    base, extras = table["project"]["dependencies"], table["project"]["optional-dependencies"]
    asked = {
        "build": table["build-system"]["requires"],
        "router": [*base, *extras["tracing"]],
        "engine": [*base, *extras["engine"], *extras["vision"]],
        "cuda": CUDA,
    }
    return {name: [Requirement(one) for one in lines] for name, lines in asked.items()}


def file(name: str) -> Path:
    return DOCKER / f"requirements-{name}.txt"


def locked(text: str) -> Iterator[tuple[Requirement, list[str]]]:
    """Each with its hashes."""
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            requirement, *hashes = line.split("--hash=")
            yield Requirement(requirement.strip()), [one.strip() for one in hashes]


def is_of_torch(name: str) -> bool:
    return canonicalize_name(name).startswith(OF_TORCH)


def check(name: str, asked: Sequence[Requirement], text: str) -> list[str]:
    """What is wrong with a lock."""
    versions = {canonicalize_name(one.name): one.specifier for one, _ in locked(text)}
    problems = [f"{name}: {one} has no hash" for one, hashes in locked(text) if not hashes]
    for one in asked:
        if is_of_torch(one.name) and one.name not in versions:
            continue
        exact = versions.get(canonicalize_name(one.name))
        if exact is None:
            problems.append(f"{name}: {one.name} is missing")
        elif not one.specifier.contains(str(exact).removeprefix("=="), prereleases=True):
            problems.append(f"{name}: {one.name}{exact} is not what pyproject.toml allows, {one.specifier}")
    return problems


def main(uv: str) -> None:
    for name, asked in project().items():
        with tempfile.TemporaryDirectory() as folder:
            wanted, made = Path(folder) / "in.txt", Path(folder) / "out.txt"
            wanted.write_text("\n".join(map(str, asked)))
            options = ["--generate-hashes", "--no-header", "--no-annotate", "--universal", "--python-version", PYTHON]
            subprocess.run([uv, "pip", "compile", "--quiet", *options, "-o", str(made), str(wanted)], check=True)
            text = made.read_text() if name == "cuda" else "".join(_without_torch(made.read_text()))
            file(name).write_text(HEADER + text)


def _without_torch(text: str) -> Iterator[str]:
    """Line by line: a requirement, and its hashes below it."""
    keep = True
    for line in text.splitlines(keepends=True):
        if not line.startswith(" "):
            keep = not is_of_torch(Requirement(line.split(" \\")[0]).name)
        if keep:
            yield line


if __name__ == "__main__":
    main(sys.argv[1])

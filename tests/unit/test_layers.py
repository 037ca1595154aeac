"""Who may import whom. The router must run where there is no torch, and the scheduler where there is no network."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("backhaul", "router", "engine", "connectors")
NIXL = ("nixl", "nixl_cu12", "nixl_cu13")
SERVING = ("engine.scheduler", "engine.core", "engine.app", "engine.server", "engine.api", "connectors", "aiohttp")


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, in functions too, as written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def knows_nixl(path: Path) -> bool:
    """The files that wrap NIXL, and the torch its bindings want."""
    return path.parent.name == "connectors" and path.stem.split("_")[0] == "nixl"


def violations(folder: str, allowed: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    """Imports of our own packages outside `allowed`, and of anything in `forbidden`."""
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if not knows_nixl(path)]
    assert files, f"{folder} holds no files"
    return [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files
        for module in imports(path)
        if is_in(module, *forbidden) or (is_in(module, *OURS) and module not in OURS and not is_in(module, *allowed))
    ]


@pytest.mark.parametrize(
    ("folder", "allowed", "forbidden"),
    [
        ("router", ("router", "connectors.wire"), ("torch", "tokenizers", "numpy", *NIXL)),
        ("connectors/wire", ("connectors.wire",), ("torch", "numpy", "aiohttp", "redis", *NIXL)),
        ("connectors", ("connectors",), ("torch", "redis", *NIXL)),
        ("engine", ("engine", "connectors"), ("redis",)),
        ("engine/model", ("engine",), SERVING),
        ("engine/attention", ("engine",), SERVING),
    ],
)
def test_import_directions(folder: str, allowed: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    assert violations(folder, allowed, forbidden) == []


def test_only_its_wrapper_knows_nixl() -> None:
    users = [path for package in OURS for path in (ROOT / package).rglob("*.py")]
    assert [path for path in users if not knows_nixl(path) and any(is_in(m, *NIXL) for m in imports(path))] == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("router.run", ("torch", "numpy", "engine", "nixl", "nixl_cu12", "tokenizers", "jinja2", "gguf")),
        ("engine.scheduler", ("torch", "aiohttp", "nixl", "nixl_cu12", "numpy")),
        ("connectors.wire.sse", ("torch", "aiohttp", "redis")),
        ("connectors.wire.transfer", ("torch", "aiohttp", "redis")),
    ],
)
def test_importing_pulls_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    """Also what the imports import in their turn."""
    script = f"import sys, {module}; print(sorted(m for m in sys.modules if m.split('.')[0] in {absent!r}))"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"

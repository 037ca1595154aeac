"""Images, without Docker: what they are made of is there and locked, and what they start does start from it."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from backhaul.settings import load
from deploy import lock
from engine.config import EngineConfig
from router.config import RouterConfig
from router.discovery.kube import Cluster
from router.discovery.parse import parse
from tests.deploy.dockerfile import Dockerfile, is_sent

IMAGES = {name: Dockerfile((lock.DOCKER / f"{name}.Dockerfile").read_text()) for name in ("router", "engine")}
COMPOSE = lock.DOCKER / "compose.yaml"


@pytest.mark.parametrize("name", lock.project())
def test_lock_has_what_pyproject_asks_for(name: str) -> None:
    asked, text = lock.project()[name], lock.file(name).read_text()
    assert lock.check(name, asked, text) == [], "run `make lock`"
    assert lock.check(name, [*asked, Requirement("nothing>=1")], text) == [f"{name}: nothing is missing"]


def test_lock_that_is_too_old_is_found() -> None:
    text = "aiohttp==3.13.0 \\\n    --hash=sha256:00\nyarl==1.0\n"
    assert lock.check("router", [Requirement("aiohttp>=3.14,<4")], text) == [
        "router: yarl==1.0 has no hash",
        "router: aiohttp==3.13.0 is not what pyproject.toml allows, <4,>=3.14",
    ]


@pytest.mark.parametrize("name", ["router", "engine"])
def test_lock_is_whole(name: str) -> None:
    """What the locked versions need in turn is locked as well, as far as these are installed here."""
    versions = {canonicalize_name(one.name): str(one.specifier) for one, _ in lock.locked(lock.file(name).read_text())}
    looked_at = 0
    for package, version in versions.items():
        try:
            installed = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        if version != f"=={installed.version}":
            continue
        looked_at += 1
        for needed in map(Requirement, installed.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": "", "sys_platform": "linux"}):
                name_of = canonicalize_name(needed.name)
                assert name_of in versions or lock.is_of_torch(name_of), f"{package} needs {needed}"
    assert looked_at > len(versions) / 2


def test_torch_is_the_version_that_is_tested() -> None:
    [pin] = [one for one in lock.project()["engine"] if one.name == "torch"]
    assert f"TORCH={str(pin.specifier).removeprefix('==')}" in IMAGES["engine"].of("ARG")


@pytest.mark.parametrize("name", IMAGES)
def test_sources_exist_and_are_sent(name: str) -> None:
    sources = [source for copy in IMAGES[name].copies for source in copy.sources]
    assert sources
    for source in sources:
        assert (lock.ROOT / source).exists(), source
        assert is_sent(source), source
    for secret in (".git", "tests", ".venv", "deploy/helm", "build"):
        assert not is_sent(secret)


@pytest.mark.parametrize("name", IMAGES)
def test_image_runs_as_nobody_in_particular(name: str) -> None:
    assert IMAGES[name].of("USER") == ["10001:10001"]
    assert all(":" in one or one == "build" for one in IMAGES[name].of("FROM"))
    assert not re.search(r":latest\b", IMAGES[name].text)


@pytest.mark.parametrize("name", IMAGES)
def test_command_starts_from_what_is_copied(name: str, tmp_path: Path) -> None:
    """The wheel is built as in the Dockerfile, of nothing else, and started with none of this repository in reach."""
    image = IMAGES[name]
    source, wheels, place = (tmp_path / one for one in ("src", "wheels", "site"))
    source.mkdir()
    image.copy_into(source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(wheels), "."], cwd=source, check=True, capture_output=True, timeout=100)
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    if name == "engine":
        assert sorted(path.name for path in place.rglob("*.cpp")) == sorted(
            path.name for path in (lock.ROOT / "engine").rglob("*.cpp")
        )
    assert image.command == ["backhaul", name]
    for flags, expected in (
        (["-m", *image.command, "--help"], "usage: backhaul"),
        (["-m", *image.command, "--nonsense"], "nonsense"),
        (["-c", f"import {name}.run"], ""),
    ):
        run = subprocess.run(
            # -S: without the .pth files by which the repository itself is found
            [sys.executable, "-S", *flags],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{place}:{sysconfig.get_path('purelib')}", "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert expected in run.stdout + run.stderr
        assert run.returncode == (2 if expected == "nonsense" else 0), run.stderr


class _Compose:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = re.sub(r"\$\{(\w+):\?[^}]*\}", r"<\1>", COMPOSE.read_text())
        self.services: dict[str, Any] = yaml.safe_load(text)["services"]
        self._monkeypatch = monkeypatch

    def args(self, service: str) -> list[str]:
        for name, value in self.services[service]["environment"].items():
            self._monkeypatch.setenv(name, value)
        args: list[str] = self.services[service]["command"]
        return args


def test_compose_starts_what_works_together(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = _Compose(monkeypatch)
    assert set(compose.services) == {"valkey", "router", "prefill", "decode"}
    command, *flags = compose.args("router")
    router = load(RouterConfig, flags, prog=command, env_prefix="BACKHAUL_ROUTER_")
    assert router.redis.startswith("redis://valkey:6379")
    for role in ("prefill", "decode"):
        command, *flags = compose.args(role)
        engine = load(EngineConfig, flags, prog=command, env_prefix="BACKHAUL_ENGINE_")
        assert (engine.role, engine.model, engine.host) == (role, "/models/<MODEL>", "0.0.0.0")
        [entry] = router.entries(role)
        source = parse(entry, Cluster())
        assert not isinstance(source, str)
        assert source.name == f"dns://{role}:{engine.port}"
        assert _seconds(compose.services[role]) > engine.drain_timeout
        assert engine.drain_timeout >= engine.kv_transfer_config.kv_connector_extra_config.kv_lease_duration
    assert _seconds(compose.services["router"]) > router.drain_delay + router.drain_timeout
    assert compose.services["router"]["ports"] == [f"127.0.0.1:8000:{router.port}"]


def _seconds(service: dict[str, Any]) -> int:
    return int(service["stop_grace_period"].removesuffix("s"))


def test_compose_builds_these_images_and_gives_away_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    version = yaml.safe_load((lock.ROOT / "deploy/helm/backhaul/Chart.yaml").read_text())["appVersion"]
    for name, service in _Compose(monkeypatch).services.items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        if name != "valkey":
            assert (COMPOSE.parent / service["build"]["context"]).resolve() == lock.ROOT
            assert (lock.ROOT / service["build"]["dockerfile"]).is_file()
            assert service["image"].split(":")[1].removesuffix("-cpu") == version

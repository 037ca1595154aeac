"""What docs and README name exists: settings, metrics, files, sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul.chat import ChatConfig
from backhaul.fields import settings_of
from backhaul.status import StatusConfig
from backhaul.up import UpConfig
from engine.config import EngineConfig
from router.config import RouterConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (RouterConfig, EngineConfig, UpConfig, ChatConfig, StatusConfig)
OURS = {setting.flag for program in PROGRAMS for setting in settings_of(program)} | {
    *(setting.negative_flag for program in PROGRAMS for setting in settings_of(program)),
    *("--config", "--help"),
}
OTHERS = (
    # vLLM's
    *(
        "--kv-transfer-config",
        "--api-key",
        "--enable-prompt-tokens-details",
        "--shutdown-timeout",
        "--tensor-parallel-size",
    ),
    *("--otlp-traces-endpoint", "--allowed-media-domains", "--data-parallel-size", "--enforce-eager"),
)
ALSO = re.compile(r"^(docker|helm|kubectl|curl|pip|openssl|make|vllm|python|\.venv/bin/pip|npm)\b")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _slug(heading: str) -> str:
    """As GitHub makes it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def _links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL)):
        if "://" not in target:
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for link in _links(page):
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        headings = re.findall(r"^#+ (.+)$", _text(target), re.MULTILINE) if target.suffix == ".md" else []
        if not target.exists() or (section and section not in map(_slug, headings)):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("name", ["observing", "security", "sizing", "tuning", "upgrade", "troubleshooting"])
def test_flags_of_the_guides_are_settings(name: str) -> None:
    told = _text(ROOT / f"docs/{name}.md")
    commands = "\n".join(line for line in told.splitlines() if not ALSO.match(line.removeprefix("$ ")))
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?:\.[a-z-]+)*", commands))
    assert sorted(flags - OURS - set(OTHERS)) == []


@pytest.mark.parametrize("name", ["observing", "security", "sizing", "tuning", "upgrade", "troubleshooting"])
def test_metrics_of_the_guides_exist(name: str) -> None:
    """docs/metrics.md is made from the code, so what is there is."""
    known = set(re.findall(r"^\| `([^`]+)`", _text(ROOT / "docs/metrics.md"), re.MULTILINE))
    whole = {f"{metric}{end}" for metric in known for end in ("", "_sum", "_count", "_bucket")}
    named = set(re.findall(r"`((?:backhaul_(?:router|engine)_|vllm:)[a-z_]+)", _text(ROOT / f"docs/{name}.md")))
    assert sorted(named - whole) == []

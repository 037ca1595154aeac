"""Models the tests run on, tiny random ones and the small real one; and which tests may run at the same time."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.tiny import make_tiny

TOGETHER = (
    "tests/chaos/test_rolling",
    "tests/chaos/test_short",
    "tests/e2e/",
    "tests/fuzz/",
    "tests/interop/",
    "tests/observe/test_live",
    "tests/property/",
)
"""Files that share what they start, which is much."""


class Together(LoadFileScheduling):
    """Where two workers share the tests (`make test`), one runs all of these folders: each fleet is started once, and
    no two of them compete for the cores. Of the others, the tests of a file stay together."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "together" if file.startswith(TOGETHER) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    return Together(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # tests and what they import stay, and looking through them takes most of a second each time


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random llama; not to be written to."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model that takes pictures; not to be written to."""
    from tests.tiny_vlm import make_tiny_vlm  # transformers, which makes it, takes seconds to import

    return make_tiny_vlm(tmp_path_factory.mktemp("tiny") / "vlm")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct weights; tests that use this carry @pytest.mark.model."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    path = cache / "backhaul/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file(), f"{path} is missing: run `make model`"
    return path

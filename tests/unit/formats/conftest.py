from __future__ import annotations

from pathlib import Path

import pytest

from tests.harmony_model import make_tiny_harmony


@pytest.fixture(scope="session")
def harmony_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_harmony(tmp_path_factory.mktemp("harmony") / "llama")

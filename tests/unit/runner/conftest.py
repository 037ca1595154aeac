from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_engine import TinyEngine


@pytest.fixture(scope="session")
def only_tiny_engine(tiny_model: Path) -> TinyEngine:
    return TinyEngine(tiny_model)


@pytest.fixture
def engine(only_tiny_engine: TinyEngine) -> TinyEngine:
    """An idle engine with an empty cache."""
    only_tiny_engine.restart()
    return only_tiny_engine

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.server.double import Stage


@pytest.fixture
async def stage(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model) as stage:
        yield stage


@pytest.fixture
async def prefill(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model, role="prefill", kv=True) as stage:
        yield stage


@pytest.fixture
async def decode(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model, role="decode", kv=True) as stage:
        yield stage


@pytest.fixture
async def both(tiny_model: Path) -> AsyncIterator[Stage]:
    async with Stage(tiny_model, role="both", kv=True) as stage:
        yield stage

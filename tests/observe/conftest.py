"""Prefill and decode engines by script, and a store, for routers of several processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.stub_engine import StubEngine
from tests.valkey import valkey


@pytest.fixture
async def p() -> AsyncIterator[StubEngine]:
    async with StubEngine("prefill").running() as engine:
        yield engine


@pytest.fixture
async def d() -> AsyncIterator[StubEngine]:
    async with StubEngine("decode").running() as engine:
        yield engine


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.router_harness import Front, router_over
from tests.stub_engine import StubEngine
from tests.valkey import valkey


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real store for all tests that do not break it."""
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture
async def p() -> AsyncIterator[StubEngine]:
    async with StubEngine("prefill").running() as engine:
        yield engine


@pytest.fixture
async def d() -> AsyncIterator[StubEngine]:
    async with StubEngine("decode").running() as engine:
        yield engine


@pytest.fixture
async def front(p: StubEngine, d: StubEngine, redis_url: str) -> AsyncIterator[Front]:
    """One prefill engine, one decode engine, the router over them."""
    async with router_over([p], [d], redis_url) as front:
        yield front

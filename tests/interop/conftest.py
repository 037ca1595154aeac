"""Real vLLM engines and the real router over them.

Not part of a plain `pytest`: the environment is a download of gigabytes. `make interop`, or `pytest tests/interop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.interop.engines import VLLM
from tests.interop.routers import RouterProcess
from tests.valkey import valkey

HERE = Path(__file__).parent
SECONDS = 900
"""For a test with the start of what it needs."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only if someone asks for it by name."""
    asked = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return None if any(path.resolve().is_relative_to(HERE) for path in asked) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(SECONDS))


@dataclass
class Fleet:
    prefill: VLLM
    decode: VLLM
    """As it is."""
    decode_33: VLLM
    """With transfer params in its streams."""
    truth: VLLM
    """Without any cache."""


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def fleet(logs: Path) -> Iterator[Fleet]:
    fleet = Fleet(
        VLLM("prefill", logs),
        VLLM("decode", logs),
        VLLM("decode_33", logs, params_in_streams=True),
        VLLM("truth", logs, kv=False),
    )
    engines = (fleet.prefill, fleet.decode, fleet.decode_33, fleet.truth)
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait()
        yield fleet
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture(scope="session")
def router(fleet: Fleet, redis: str, logs: Path) -> Iterator[RouterProcess]:
    with RouterProcess(fleet.prefill.url, fleet.decode.url, redis, logs / "router").running() as router:
        yield router


@pytest.fixture(scope="session")
def router_33(fleet: Fleet, redis: str, logs: Path) -> Iterator[RouterProcess]:
    other = redis.removesuffix("/0") + "/1"
    with RouterProcess(fleet.prefill.url, fleet.decode_33.url, other, logs / "router_33").running() as router:
        yield router

"""Fixtures shared by the end-to-end tests: one stack and one reference for the whole run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.support import Reference, Stack, start_stack, stop_stack


@pytest.fixture(scope="session")
def stack(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    process, stack = start_stack(
        tmp_path_factory.mktemp("up"),
        *("--model", str(smollm2_path), "--dtype", "float32"),
        BACKHAUL_ENGINE_TOOL_CALL_PARSER="hermes",  # this model's template knows no tools
    )
    yield stack
    stop_stack(process)


@pytest.fixture(scope="session")
def reference(smollm2_path: Path) -> Reference:
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the engines are idle meanwhile
    return Reference(smollm2_path, torch.float32)

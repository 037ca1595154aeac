from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.property.reference import Reference
from tests.property.talker import make_talker


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that all of the fleet's engines run."""
    return make_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="session")
def reference(talker: Path) -> Reference:
    torch.set_num_threads(1)
    return Reference(talker)

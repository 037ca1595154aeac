from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench.engine_peers import Backhaul
from bench.engine_worker import Worker
from engine.model.loader import load_model
from tests.tiny import make_tiny

ENGINE = """
import sys
from bench.engine_worker import serve

class Engine:
    def about(self):
        return "one 1.0"
    def prefill(self, prompt):
        print("a line that an engine prints")
        return sum(prompt) / 2
    def open(self, prompt, batch):
        self.seconds = float(batch)
    def decode(self, steps):
        return self.seconds
    def close(self):
        sys.exit("out of memory")

serve(Engine)
"""


def test_a_worker_answers_and_says_why_it_ended(tmp_path: Path) -> None:
    (tmp_path / "an_engine.py").write_text(ENGINE)
    worker = Worker(Path(sys.executable), "an_engine", [], {"PYTHONPATH": str(tmp_path)})
    assert worker.about() == "one 1.0"
    assert worker.prefill([1, 2]) == 1.5
    worker.open([1], 4)
    assert worker.decode(1) == 4.0
    with pytest.raises(SystemExit, match=r"(?s)an_engine ended\n.*out of memory"):
        worker.close()
    worker.end()


def test_every_opened_sequence_has_the_prompt_before_it(tmp_path: Path) -> None:
    loaded = load_model(make_tiny(tmp_path), dtype=torch.float32)
    engine, prompt = Backhaul(loaded, max_tokens=200, max_batch=3, room=16), list(range(1, 40))
    engine.open(prompt, 3)
    engine.decode(5)
    together = [request.token_ids for request in engine._requests]
    engine.open(prompt, 1)
    engine.decode(5)
    assert together == [engine._requests[0].token_ids] * 3
    assert len(together[0]) == len(prompt) + 1 + 5

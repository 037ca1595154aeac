"""All layers of a decode step in one call, against the layers one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Batch, ScheduledRequest
from tests.running import last_token, make_machine, random_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_one_call_equals_the_layers_one_by_one_bit_for_bit(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    machine = make_machine(tmp_path, architecture=architecture, dtype=dtype)
    model = machine.runner.model
    if model.dtype != torch.float32:
        pytest.skip("this machine computes in bfloat16")
    assert model.decode_layers is not None
    requests = [machine.request(random_tokens(length), room=3) for length in (1, 15, 16, 40, 300)]
    for request in requests:
        machine.prefill(request)
        request.append(7)
    at_once = machine.decode(*requests)
    arena = machine.cache.arena.clone()
    model.decode_layers = None
    assert torch.equal(machine.decode(*requests), at_once)
    assert torch.equal(machine.cache.arena, arena)


def test_step_with_a_prompt_in_it_and_a_model_that_norms_q_and_k_go_layer_by_layer(tmp_path: Path) -> None:
    assert make_machine(tmp_path / "qwen3", architecture="qwen3").runner.model.decode_layers is None
    machine = make_machine(tmp_path / "llama")
    assert machine.runner.model.decode_layers is not None
    old, new = machine.request(random_tokens(20), room=3), machine.request(random_tokens(30), room=3)
    machine.prefill(old)
    old.append(7)
    mixed = machine.runner.logits(Batch([last_token(old), ScheduledRequest(new, 0, 30)]))
    torch.testing.assert_close(mixed[:1], machine.decode(old), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[1], machine.prefill(new), atol=1e-5, rtol=1e-5)


def test_without_kernels_there_is_no_such_call(tmp_path: Path) -> None:
    assert make_machine(tmp_path, use_kernels=False).runner.model.decode_layers is None

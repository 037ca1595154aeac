"""A request's result does not depend on how its tokens are cut into steps, nor on what else is in the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Batch, ScheduledRequest
from engine.request import SamplingParams
from engine.runner import RunnerError
from tests.running import BLOCK_SIZE, Machine, last_token, make_machine, random_tokens

CLOSE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=[True, False], ids=["kernels", "torch"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return make_machine(tmp_path_factory.mktemp("model"), use_kernels=request.param, num_blocks=512)


@pytest.mark.parametrize("chunk", [1, 7, 16, 31, 128, 150])
def test_chunked_prefill_equals_one_shot(machine: Machine, chunk: int) -> None:
    tokens = random_tokens(290)
    whole, chunked = machine.request(tokens), machine.request(tokens)
    torch.testing.assert_close(machine.prefill(chunked, chunk), machine.prefill(whole), **CLOSE)
    kv = [machine.cache.arena[request.block_ids[: 290 // BLOCK_SIZE]] for request in (whole, chunked)]
    torch.testing.assert_close(kv[0], kv[1], **CLOSE)


@pytest.mark.parametrize("length", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE])
def test_only_the_slots_of_the_scheduled_tokens_are_written(machine: Machine, length: int) -> None:
    request = machine.request(random_tokens(length))
    machine.cache.arena.fill_(7.0)
    machine.prefill(request)
    written = (machine.cache.arena != 7.0).any(dim=-1)  # [blocks, layers, 2, kv_heads, block_size]
    expected = torch.zeros_like(written)
    for position in range(length):
        expected[request.block_ids[position // BLOCK_SIZE], ..., position % BLOCK_SIZE] = True
    assert torch.equal(written, expected)


def test_mixed_batch_equals_each_request_alone(machine: Machine) -> None:
    lengths = [1, 40, 16, 100, 17, 33]
    requests = [machine.request(random_tokens(length, seed=length)) for length in lengths]
    alone = [machine.prefill(request) for request in requests]
    for request in requests:
        machine.cache.arena[request.block_ids] = 0.0
    # Requests 1 and 4 decode their last token, 3 and 5 finish a prefill, 0 and 2 are prefilled whole.
    computed = [0, 39, 0, 50, 16, 10]
    first = [ScheduledRequest(r, 0, c) for r, c in zip(requests, computed, strict=True) if c]
    machine.runner.logits(Batch(first))
    second = [ScheduledRequest(r, c, r.num_tokens - c) for r, c in zip(requests, computed, strict=True)]
    torch.testing.assert_close(machine.runner.logits(Batch(second)), torch.stack(alone), **CLOSE)


def test_tokens_come_in_batch_order_and_only_for_requests_that_reach_their_last_token(machine: Machine) -> None:
    requests = [machine.request(random_tokens(length, seed=length)) for length in (50, 20, 60, 30)]
    expected = [int(machine.prefill(request).argmax()) for request in requests]
    assert len(set(expected)) == 4
    scheduled = [
        ScheduledRequest(requests[0], 0, 50),
        last_token(requests[1]),
        ScheduledRequest(requests[2], 0, 59),
        last_token(requests[3]),
    ]
    assert machine.runner.run(Batch(scheduled)).token_ids == [expected[0], expected[1], expected[3]]
    assert machine.runner.run(Batch(scheduled[2:3])).token_ids == []


def test_shared_prefix_blocks_are_read_by_both_requests(machine: Machine) -> None:
    prefix = random_tokens(2 * BLOCK_SIZE)
    first = machine.request(prefix + random_tokens(5, seed=1))
    machine.prefill(first)
    second = machine.request(prefix + random_tokens(9, seed=2))
    expected = machine.prefill(second)
    second.block_ids[:2] = first.block_ids[:2]
    shared = machine.runner.logits(Batch([ScheduledRequest(second, 2 * BLOCK_SIZE, 9)]))
    torch.testing.assert_close(shared[0], expected, **CLOSE)


def test_logits_that_are_not_finite_name_the_request(machine: Machine) -> None:
    good = machine.request(random_tokens(20), request_id="good")
    bad = machine.request(random_tokens(20), request_id="bad")
    tokens = machine.prefill(good).argmax()
    machine.prefill(bad)
    machine.cache.arena[bad.block_ids[0], 0, 0, 0, 3, 0] = float("nan")
    with pytest.raises(RunnerError) as raised:
        machine.runner.run(Batch([last_token(good), last_token(bad)]))
    assert raised.value.request_ids == ("bad",)
    assert machine.runner.run(Batch([last_token(good)])).token_ids == [int(tokens)]
    machine.cache.arena.zero_()


def test_seeded_request_draws_the_same_tokens_in_any_batch_and_after_recomputing(machine: Machine) -> None:
    sampling = SamplingParams(temperature=0.9, seed=11)
    prompt = random_tokens(30)

    def generate(count: int, *, company: int, preempt_at: int | None = None) -> list[int]:
        request = machine.request(prompt, sampling)
        others = [machine.request(random_tokens(10 + i, seed=i), SamplingParams()) for i in range(company)]
        (token,) = machine.runner.run(Batch([ScheduledRequest(request, 0, 30)])).token_ids
        for other in others:
            machine.prefill(other)
        request.append(token)
        for step in range(count - 1):
            if step == preempt_at:
                machine.cache.arena[request.block_ids] = 0.0
                scheduled = ScheduledRequest(request, 0, request.num_tokens)
            else:
                scheduled = last_token(request)
            tokens = machine.runner.run(Batch([*map(last_token, others), scheduled])).token_ids
            request.append(tokens[-1])
        machine.free += request.block_ids + [block for other in others for block in other.block_ids]
        return request.output_token_ids

    alone = generate(12, company=0)
    assert generate(12, company=3) == alone
    assert generate(12, company=1, preempt_at=6) == alone
    assert len(set(alone)) > 3


def test_default_threads_of_torch_are_used_and_one_thread_gives_the_same(machine: Machine) -> None:
    tokens = random_tokens(90)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(machine.prefill(machine.request(tokens)))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(results[0], results[1], **CLOSE)
    torch.testing.assert_close(results[0], results[2], **CLOSE)


def test_weights_may_be_dropped_once_the_runner_is_built(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    tokens = random_tokens(20)
    expected = machine.prefill(machine.request(tokens))
    for name, weight in machine.loaded.weights.items():
        if name != "model.embed_tokens.weight" and not name.endswith("norm.weight"):
            weight.zero_()
    machine.loaded.weights.clear()
    torch.testing.assert_close(machine.prefill(machine.request(tokens)), expected)

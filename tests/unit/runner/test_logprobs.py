"""Log probabilities: of sampled tokens and of prompts, against one plain forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import runner
from engine.batch import Batch, ScheduledRequest
from engine.likelihood import token_logprobs
from engine.logprobs import TokenLogprobs
from engine.request import Request
from tests.running import random_tokens
from tests.tiny_engine import TinyEngine

CLOSE = {"abs": 1e-4}


def forward(engine: TinyEngine, token_ids: list[int]) -> Tensor:
    """Log probabilities [tokens, vocab] after each token, of one forward pass per prefix: no chunks, no cache."""
    machine = engine.machine
    request = machine.request(token_ids)
    rows = []
    for end in range(1, len(token_ids) + 1):
        request.token_ids = token_ids[:end]
        rows.append(machine.runner.logits(Batch([ScheduledRequest(request, 0, end)]))[0])
    machine.free += request.block_ids
    return torch.stack(rows).double().log_softmax(-1)


def assert_says(told: TokenLogprobs, expected: Tensor, token_id: int, num_top: int) -> None:
    assert told.token_id == token_id
    assert told.logprob == pytest.approx(float(expected[token_id]), **CLOSE)
    assert told.rank == 1 + int((expected > expected[token_id]).sum())
    best = expected.topk(num_top)
    assert [token for token, _ in told.top] == best.indices.tolist()
    assert [logprob for _, logprob in told.top] == pytest.approx(best.values.tolist(), **CLOSE)


def assert_prompt(engine: TinyEngine, request: Request, expected: Tensor, num_top: int) -> None:
    told = engine.output(request).prompt_logprobs
    assert told is not None
    assert len(told) == request.num_prompt_tokens
    assert told[0] is None
    for position, one in enumerate(told[1:], start=1):
        assert one is not None
        assert_says(one, expected[position - 1], request.prompt_token_ids[position], num_top)


def test_ranks_and_alternatives_of_known_logits() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]]).log() + 7
    first, second = token_logprobs(logits, [2, 3], [2, 0])
    assert first.logprob == pytest.approx(torch.tensor(0.2).log())
    assert (first.token_id, first.rank, [token for token, _ in first.top]) == (2, 3, [0, 1])
    assert (second.rank, second.top) == (1, ()), "as likely as the likeliest"


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    (one,) = token_logprobs(torch.zeros(1, 3), [0], [20])
    assert len(one.top) == 3


def test_sampled_tokens_are_told_with_what_the_model_itself_says(engine: TinyEngine) -> None:
    prompt = random_tokens(20)
    biased = {"logit_bias": ((5, 100.0),), "repetition_penalty": 1.5, "presence_penalty": 1.0}
    requests = [
        engine.submit(prompt, logprobs=3, ignore_eos=True),
        engine.submit(prompt, ignore_eos=True),
        engine.submit(prompt, logprobs=0, temperature=0.7, seed=3, top_k=5, ignore_eos=True),
        engine.submit(prompt, logprobs=20, ignore_eos=True, **biased),
    ]
    engine.run()
    for request, num_top in zip(requests, (3, None, 0, 20), strict=True):
        output = engine.output(request)
        if num_top is None:
            assert output.logprobs == []
            continue
        assert len(output.logprobs) == len(output.token_ids) == 8
        expected = forward(engine, prompt + output.token_ids)
        for index, told in enumerate(output.logprobs):
            assert_says(told, expected[len(prompt) - 1 + index], output.token_ids[index], num_top)
    assert engine.output(requests[3]).token_ids[0] == 5, "else the test shows nothing of the bias"


@pytest.mark.parametrize("length", [1, 2, 16, 45])
@pytest.mark.parametrize("budget", [512, 16, 7])
def test_prompts_are_told_about_whatever_the_chunks(
    engine: TinyEngine, length: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PROMPT_ROWS", 6)
    engine.restart(budget=budget)
    prompt = random_tokens(length, seed=length)
    plain = engine.submit(random_tokens(9), max_tokens=30)
    asking = engine.submit(prompt, prompt_logprobs=2, logprobs=1)
    other = engine.submit(random_tokens(20, 5), prompt_logprobs=0)
    engine.run()
    assert_prompt(engine, asking, forward(engine, prompt), 2)
    assert_prompt(engine, other, forward(engine, other.prompt_token_ids), 0)
    assert engine.output(plain).prompt_logprobs is None
    assert len(engine.output(asking).logprobs) == 8


def test_prompt_logprobs_come_once_with_the_first_token(engine: TinyEngine) -> None:
    request = engine.submit(random_tokens(20), prompt_logprobs=1, max_tokens=3, ignore_eos=True)
    engine.step()
    assert engine.outputs.pop(request.request_id).prompt_logprobs is not None
    engine.run()
    assert engine.output(request).prompt_logprobs is None


def test_a_prompt_in_the_prefix_cache_is_computed_again(engine: TinyEngine) -> None:
    prompt = random_tokens(50)
    engine.submit(prompt)
    engine.run()
    asking = engine.submit(prompt, prompt_logprobs=1)
    plain = engine.submit(prompt)
    engine.run()
    assert_prompt(engine, asking, forward(engine, prompt), 1)
    assert engine.output(asking).num_cached_tokens == 0
    assert engine.output(plain).num_cached_tokens == 48
    assert engine.output(asking).token_ids == engine.output(plain).token_ids


@pytest.mark.parametrize("num_blocks", [6, 7, 8])
def test_prompt_logprobs_survive_preemption(engine: TinyEngine, num_blocks: int) -> None:
    """Preempted while they are collected, and after."""
    engine.restart(num_blocks=num_blocks, budget=20)
    first = engine.submit(random_tokens(30, 1), max_tokens=40, ignore_eos=True, prompt_logprobs=1)
    second = engine.submit(random_tokens(30, 2), max_tokens=40, ignore_eos=True, prompt_logprobs=1, logprobs=0)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for request in (first, second):
        assert_prompt(engine, request, forward(engine, request.prompt_token_ids), 1)
        assert len(engine.output(request).token_ids) == 40
    assert len(engine.output(second).logprobs) == 40

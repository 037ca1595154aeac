"""Sampling: each parameter against a plain reference, and draws that depend on nothing but their own request."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from engine import sampler
from engine.request import Request, SamplingParams
from engine.sampler import adjust, restrict, sample

VOCAB = 50
EOS = 7


def make_request(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: object) -> Request:
    params = SamplingParams(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    request = Request("r", prompt or [1, 2, 3], params, frozenset({EOS}), 16, b"")
    for token in output or []:
        request.append(token)
    return request


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def frequencies(logits: Tensor, count: int, **sampling: object) -> Counter[int]:
    """How often each token comes up over `count` seeds."""
    drawn: Counter[int] = Counter()
    for start in range(0, count, 500):
        requests = [make_request(seed=seed, **sampling) for seed in range(start, start + 500)]
        drawn.update(sample(logits.repeat(500, 1), requests))
    return drawn


def chi_square(drawn: Counter[int], probabilities: list[float]) -> float:
    """Pearson's statistic over its expectation's spread: about 0 for the right distribution, within a few units."""
    total = drawn.total()
    cells = [(drawn[token], total * p) for token, p in enumerate(probabilities) if total * p >= 5]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def kept(logits: Tensor, **sampling: object) -> set[int]:
    row = logits.clone()
    restrict(row, SamplingParams(**sampling))  # type: ignore[arg-type]
    return set(row.isfinite().nonzero().flatten().tolist())


def test_temperature_zero_is_greedy() -> None:
    logits = random_logits(4)
    requests = [make_request(temperature=t) for t in (0.0, 1e-6, 0.0, 0.0)]
    assert sample(logits.clone(), requests) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = random_logits(scale=temperature)
    probabilities = (logits[0].double() / temperature).softmax(-1).tolist()
    assert abs(chi_square(frequencies(logits, 4000, temperature=temperature), probabilities)) < 4
    wrong = (logits[0].double() / (temperature * 1.3)).softmax(-1).tolist()
    assert chi_square(frequencies(logits, 4000, temperature=temperature), wrong) > 4


@pytest.mark.parametrize("top_k", [1, 2, 10, 49])
def test_top_k_keeps_the_k_likeliest(top_k: int) -> None:
    logits = random_logits()[0]
    assert kept(logits, top_k=top_k) == set(logits.argsort(descending=True)[:top_k].tolist())


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 1000])
def test_top_k_can_be_off(top_k: int) -> None:
    assert len(kept(random_logits()[0], top_k=top_k)) == VOCAB


def nucleus(logits: Tensor, top_p: float) -> set[int]:
    probabilities = logits.double().softmax(-1).tolist()
    chosen: set[int] = set()
    mass = 0.0
    for token in sorted(range(len(probabilities)), key=lambda token: -probabilities[token]):
        if mass >= top_p and chosen:
            break
        chosen.add(token)
        mass += probabilities[token]
    return chosen


@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("seed", range(3))
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, seed: int) -> None:
    logits = random_logits(seed=seed)[0]
    assert kept(logits, top_p=top_p) == nucleus(logits, top_p)


@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_top_p_beyond_the_first_candidates_is_exact_too(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "TOP_P_CANDIDATES", 4)
    logits = random_logits(scale=0.2)[0]
    assert kept(logits, top_p=top_p) == nucleus(logits, top_p)
    assert len(nucleus(logits, top_p)) > 4


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_keeps_tokens_by_their_share_of_the_likeliest(min_p: float) -> None:
    logits = random_logits()[0]
    probabilities = logits.double().softmax(-1)
    expected = (probabilities >= min_p * probabilities.max() * (1 - 1e-6)).nonzero().flatten().tolist()
    assert kept(logits, min_p=min_p) == set(expected)


def test_top_p_counts_the_mass_left_by_top_k_and_min_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_k=2, top_p=0.6) == {0, 1}  # 0.4 / 0.7 < 0.6
    assert kept(logits, top_k=2, top_p=0.5) == {0}
    assert kept(logits, min_p=0.6, top_p=0.5) == {0}
    assert kept(logits, top_p=0.5) == {0, 1}


def test_draws_follow_the_distribution_that_is_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    drawn = frequencies(logits, 2000, top_k=3)
    assert abs(chi_square(drawn, [4 / 9, 3 / 9, 2 / 9, 0.0])) < 4
    assert drawn[3] == 0


def test_repetition_penalty_covers_prompt_and_output_once_each() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 3.0])
    adjust(logits, make_request([0, 0, 1], [2], repetition_penalty=2.0))
    assert logits.tolist() == [0.5, -2.0, 1.0, 3.0]


def test_frequency_and_presence_penalties_cover_the_output_only() -> None:
    logits = torch.zeros(4)
    adjust(logits, make_request([0, 0, 1], [2, 2, 3], frequency_penalty=0.5, presence_penalty=0.25))
    assert logits.tolist() == [0.0, 0.0, -1.25, -0.75]


def test_bias_comes_before_the_penalties() -> None:
    logits = torch.tensor([1.0, 1.0])
    adjust(logits, make_request([0], logit_bias=((0, -3.0), (1, 2.0)), repetition_penalty=2.0))
    assert logits.tolist() == [-4.0, 3.0]


def test_bias_moves_a_greedy_choice() -> None:
    logits = random_logits()
    assert sample(logits, [make_request(temperature=0.0, logit_bias=((13, 100.0),))]) == [13]


def test_min_tokens_forbids_stopping_until_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 9], logits[0, 4] = 5.0, 4.0, 3.0
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": frozenset({9})}
    assert sample(logits.clone(), [make_request(output=[1], **params)]) == [4]
    assert sample(logits.clone(), [make_request(output=[1, 1], **params)]) == [EOS]


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-3, 1e30])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_extreme_parameters_still_draw_a_token(temperature: float, penalty: float, min_tokens: int) -> None:
    request = make_request(
        [1, 2, 3], [4], temperature=temperature, repetition_penalty=penalty, min_tokens=min_tokens, top_p=0.9, seed=1
    )
    (token,) = sample(random_logits(), [request])
    assert 0 <= token < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_a_stop_token_cannot_forbid_them_all(temperature: float) -> None:
    request = make_request(temperature=temperature, min_tokens=5, stop_token_ids=frozenset(range(VOCAB)))
    (token,) = sample(random_logits(), [request])
    assert 0 <= token < VOCAB


def test_penalties_leave_other_rows_alone() -> None:
    logits = random_logits(3)
    requests = [
        make_request(temperature=0.0),
        make_request(temperature=0.0, output=[5], repetition_penalty=1.7, logit_bias=((3, 9.0),)),
        make_request(temperature=0.0),
    ]
    changed = logits.clone()
    sample(changed, requests)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert not torch.equal(changed[1], logits[1])


def test_rows_of_a_mixed_batch_are_as_alone() -> None:
    logits = random_logits(6)
    sampling: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.5, "seed": 3, "top_k": 5},
        {"temperature": 0.0, "min_tokens": 4},
        {"temperature": 1.0, "seed": 4, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 1.0},
    ]
    requests = [make_request(output=[2, 2], **each) for each in sampling]
    alone = [sample(logits[i : i + 1].clone(), [requests[i]])[0] for i in range(6)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [4, 0]):
        assert sample(logits[order].clone(), [requests[i] for i in order]) == [alone[i] for i in order]


def test_seeded_draws_repeat_and_differ_by_seed_and_position() -> None:
    logits = torch.zeros(1, 1000)

    def token(seed: int, output: list[int]) -> int:
        return sample(logits.clone(), [make_request(output=output, seed=seed)])[0]

    assert token(1, []) == token(1, [])
    assert len({token(seed, []) for seed in range(20)}) > 15
    assert len({token(1, [0] * position) for position in range(20)}) > 15


def test_draw_does_not_depend_on_where_the_prompt_ends() -> None:
    """A request moved to another engine has its output so far as part of the prompt there."""
    logits = torch.zeros(1, 1000)
    here = make_request([1, 2], [3, 4], seed=9)
    there = make_request([1, 2, 3, 4], seed=9)
    assert sample(logits.clone(), [here]) == sample(logits.clone(), [there])


def test_draws_without_a_seed_vary() -> None:
    requests = [make_request() for _ in range(50)]
    assert len(set(sample(torch.zeros(50, 1000), requests))) > 30


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_extreme_draws_never_hit_an_impossible_token(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_uniform", lambda request: uniform)
    logits = torch.full((1, 10), float("-inf"))
    logits[0, 3], logits[0, 6] = 1.0, 1.0
    assert sample(logits, [make_request()]) == [3 if uniform == 0.0 else 6]

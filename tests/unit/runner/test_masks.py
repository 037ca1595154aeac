"""Which tokens may come next: lists of tokens and words, and the minimum length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.masks import next_tokens, pack
from engine.request import Request, SamplingParams
from engine.sampler import NO_TOKEN, sample

VOCAB = 21
EOS = 7


def make_request(output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2, 3), **sampling: object) -> Request:
    params = SamplingParams(**{"temperature": 0.0} | sampling)  # type: ignore[arg-type]
    request = Request("r", list(prompt), params, frozenset({EOS}), 16, b"")
    for token in output:
        request.append(token)
    return request


def left(request: Request) -> set[int]:
    mask = next_tokens(request, VOCAB)
    return set(range(VOCAB)) if mask is None else set(np.flatnonzero(mask).tolist())


def test_without_wishes_there_is_no_mask() -> None:
    assert next_tokens(make_request(), VOCAB) is None


@pytest.mark.parametrize("allowed", [[0], [20], [3, 8, 15, 16, 3], list(range(VOCAB))])
def test_allowed_tokens_are_what_is_left(allowed: list[int]) -> None:
    assert left(make_request(allowed_tokens=pack(allowed, VOCAB))) == set(allowed)


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [
        ((), {4}),
        ((5,), {4, 6}),
        ((5, 6), {4, 9}),
        ((6, 5), {4, 6}),
        ((5, 6, 1), {4}),
        ((9, 5, 6), {4, 9}),
    ],
)
def test_last_token_of_a_bad_word_is_forbidden_after_the_others(output: tuple[int, ...], forbidden: set[int]) -> None:
    request = make_request(output, bad_words=((4,), (5, 6), (5, 6, 9)))
    assert left(request) == set(range(VOCAB)) - forbidden


def test_a_bad_word_begun_in_the_prompt_is_not_looked_for() -> None:
    assert next_tokens(make_request(prompt=(1, 5), bad_words=((5, 6),)), VOCAB) is None
    assert left(make_request((5,), prompt=(1, 5), bad_words=((5, 5, 6),))) == set(range(VOCAB))


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_min_tokens_forbids_eos_and_stop_tokens_until_reached(count: int) -> None:
    request = make_request((1,) * count, min_tokens=2, stop_token_ids=frozenset({9}))
    assert left(request) == set(range(VOCAB)) - ({EOS, 9} if count < 2 else set())


def test_ignored_eos_is_forbidden_below_min_tokens_too() -> None:
    assert EOS not in left(make_request(min_tokens=2, ignore_eos=True))
    assert EOS in left(make_request(ignore_eos=True))


def test_min_tokens_gives_way_where_only_stop_tokens_are_left() -> None:
    request = make_request(min_tokens=5, stop_token_ids=frozenset({9}), allowed_tokens=pack([EOS, 9], VOCAB))
    assert left(request) == {EOS, 9}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forbidden_never_comes_whatever_the_penalties(temperature: float) -> None:
    logits = torch.full((1, VOCAB), -1e30)
    logits[0, 5] = 100.0
    request = make_request(
        (5, 6), (5, 6), temperature=temperature, repetition_penalty=100.0, allowed_tokens=pack([6, 8], VOCAB)
    )
    assert sample(logits, [request])[0] in (6, 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_left_no_token_comes_and_the_others_are_as_alone(temperature: float) -> None:
    def requests() -> list[Request]:
        return [
            make_request(temperature=temperature, seed=1),
            make_request(temperature=temperature, allowed_tokens=pack([4], VOCAB), bad_words=((4,),)),
            make_request(temperature=temperature, seed=2),
        ]

    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = sample(logits.clone(), requests())
    assert tokens[1] == NO_TOKEN
    for row in (0, 2):
        assert [tokens[row]] == sample(logits[row : row + 1].clone(), requests()[row : row + 1])


def test_a_word_can_be_kept_out_of_a_whole_answer() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5] = 2.0, 1.0
    request = make_request(bad_words=((4, 4),))
    for _ in range(6):
        request.append(sample(logits.clone(), [request])[0])
    assert request.output_token_ids == [4, 5, 4, 5, 4, 5]

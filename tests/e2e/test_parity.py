"""Prefill on one engine, decode on the other: the tokens are those of one cold model, at every prompt length."""

from __future__ import annotations

import random

import pytest

from tests.e2e.support import WORDS, Reference, Stack, post

pytestmark = pytest.mark.model

BLOCK = 16
LENGTHS = [
    1,
    2,
    7,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    100,
    255,
    256,
    257,
    511,
    512,
    513,
    3000,
]
MAX_TOKENS = 12


def prompt_of(length: int, reference: Reference) -> list[int]:
    """`length` token ids of plain text, different for each length."""
    chooser = random.Random(length)
    text = " ".join(chooser.choice(WORDS) for _ in range(length + 8))
    ids = reference.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [int(token) for token in ids[:length]]


@pytest.mark.parametrize("length", LENGTHS)
def test_completion_of_exact_length_equals_transformers(length: int, stack: Stack, reference: Reference) -> None:
    prompt = prompt_of(length, reference)
    assert len(prompt) == length
    answer = post(
        f"{stack.base_url}/completions",
        {
            "model": stack.model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    token_ids = answer["choices"][0]["token_ids"]
    assert len(token_ids) == MAX_TOKENS
    assert token_ids == reference.likeliest(prompt, token_ids)
    assert answer["usage"]["prompt_tokens"] == length


@pytest.mark.parametrize("seed", range(2))
def test_chat_over_turns_equals_transformers(seed: int, stack: Stack, reference: Reference) -> None:
    """Each turn is prefilled on P with what P still caches, and decoded on D with what D still caches."""
    chooser = random.Random(seed)
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    for turn in range(3):
        words = " ".join(chooser.choice(WORDS) for _ in range(5 + 20 * turn))
        messages.append({"role": "user", "content": f"Say something about: {words}."})
        answer = post(
            f"{stack.base_url}/chat/completions",
            {"model": stack.model, "messages": messages, "max_tokens": 24, "temperature": 0, "return_token_ids": True},
        )
        prompt = reference.chat_ids(messages)
        token_ids, text = answer["choices"][0]["token_ids"], answer["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert token_ids == reference.likeliest(prompt, token_ids)
        assert reference.ends_rightly(token_ids, 24)
        assert text == reference.decode(token_ids)
        messages.append({"role": "assistant", "content": text})

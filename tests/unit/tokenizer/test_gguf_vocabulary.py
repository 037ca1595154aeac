"""Vocabularies from GGUF metadata: how each family cuts text, what it puts around it, and SentencePiece's merging."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from engine.detokenizer import byte_of_character
from engine.gguf_vocabulary import build_backend
from engine.model.errors import ModelError
from engine.model.fields import Fields

BYTES = list(byte_of_character())
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def byte_level(pre: str | None, *, tokens: list[str] | None = None, **changes: Any) -> tokenizers.Tokenizer:
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*BYTES, "<s>", "</s>", "<tool>", *(tokens or [])],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3, 3, 4] + [1] * len(tokens or [])),
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    values["tokenizer.ggml.tokens"].append("ab")
    values["tokenizer.ggml.token_type"] = np.append(values["tokenizer.ggml.token_type"], 1)
    values |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return build_backend(Fields("m.gguf", values))


def words(splitter: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    table = byte_of_character()
    return [bytes(table[c] for c in word).decode() for word, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", "\n\n ", " x", "1", "2", "3", "4", "  ", "5", " (", "ok", ")!", "\n"]),
        ("gpt-2", ["It", "'s", "\n\n ", " x", "1234", " ", " 5", " (", "ok", ")!", "\n"]),
        ("qwen2", ["It", "'s", "\n\n", " ", " x", "1", "2", "3", "4", " ", " ", "5", " (", "ok", ")!\n"]),
        ("llama-bpe", ["It", "'s", "\n\n", " ", " x", "123", "4", " ", " ", "5", " (", "ok", ")!\n"]),
        ("default", ["It", "'", "s", "\n\n ", " x", "123", "4", " ", " ", "5", " ", "(", "ok", ")!", "\n"]),
        (None, ["It", "'", "s", "\n\n ", " x", "123", "4", " ", " ", "5", " ", "(", "ok", ")!", "\n"]),
    ],
)
def test_each_family_cuts_text_its_own_way(pre: str | None, expected: list[str]) -> None:
    splitter = byte_level(pre).pre_tokenizer
    text = "It's\n\n  x1234  5 (ok)!\n"
    assert words(splitter, text) == expected


@pytest.mark.parametrize(
    ("pre", "published"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ),
        (
            "qwen2",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
            ),
        ),
        (
            "llama-bpe",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
            ),
        ),
    ],
)
@settings(deadline=None)
@given(
    text=st.text(
        st.one_of(st.sampled_from("aZé'sTrR \t\n\r019½٣.,!(日😀\u3000"), st.characters(exclude_categories=["Cs"])),
        max_size=40,
    )
)
def test_families_cut_as_their_publishers_tokenizers_do(
    pre: str, published: pre_tokenizers.PreTokenizer, text: str
) -> None:
    assert words(byte_level(pre).pre_tokenizer, text) == words(published, text)


def test_qwen_composes_characters_first() -> None:
    assert byte_level("qwen2").encode("e\u0301").ids == byte_level("qwen2").encode("\u00e9").ids
    assert byte_level("gpt-2").encode("e\u0301").ids != byte_level("gpt-2").encode("\u00e9").ids


def test_llama3_takes_whole_words_without_merging() -> None:
    assert byte_level("llama-bpe", tokens=["hey"], add_bos_token=False).encode("hey").tokens == ["hey"]
    assert byte_level("gpt-2", tokens=["hey"]).encode("hey").tokens == ["h", "e", "y"]


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("gpt-2", {}, [None]),
        ("gpt-2", {"add_bos_token": True}, [256, None]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [256, None, 257]),
        ("llama-bpe", {}, [256, None]),
        ("llama-bpe", {"add_bos_token": False}, [None]),
    ],
)
def test_special_tokens_are_put_around_a_text(pre: str, changes: dict[str, bool], expected: list[int | None]) -> None:
    backend = byte_level(pre, **changes)
    letter = BYTES.index("x")
    assert backend.encode("x").ids == [letter if id_ is None else id_ for id_ in expected]
    assert backend.encode("x", add_special_tokens=False).ids == [letter]


def test_control_tokens_are_hidden_and_user_defined_ones_are_not() -> None:
    backend = byte_level("gpt-2")
    ids = backend.encode("<s>a<tool>b</s>").ids
    assert ids == [256, BYTES.index("a"), 258, BYTES.index("b"), 257]
    assert backend.decode(ids, skip_special_tokens=True) == "a<tool>b"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"pre": "chatglm-bpe"}, "tokenizer.ggml.pre 'chatglm-bpe' is not supported"),
        ({"tokens": []}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"tokens": ["a", "b", "a"]}, "holds 'a' twice"),
        ({"token_type": np.array([1, 2])}, "must give one type for each of"),
        ({"merges": ["ab"]}, "'ab', which is not a pair"),
        ({"merges": ["a Q9"]}, "the tokenizer is inconsistent"),
        ({"add_bos_token": True, "bos_token_id": 9999}, "bos_token_id must name a token"),
        ({"add_bos_token": True, "bos_token_id": -1}, "bos_token_id must name a token"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    ],
)
def test_unusable_vocabularies_are_refused(changes: dict[str, Any], says: str) -> None:
    values = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    good = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*BYTES, "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(ModelError, match=says):
        build_backend(Fields("m.gguf", good | values))


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁a", "ab", "▁ab", "ba", "aa", "bab", "▁▁", "abab", "▁aab", "a", "b", "▁"]


def sentencepiece(order: list[float] | None = None, **changes: Any) -> tokenizers.Tokenizer:
    tokens = PIECES + WORDS
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0] * len(PIECES) + (order or [-float(i) for i in range(len(WORDS))]), dtype=np.float32),
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(WORDS)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return build_backend(Fields("m.gguf", {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items()}))


def join_best_neighbours(text: str, scores: dict[str, float]) -> list[str]:
    """What SentencePiece does, as its paper says it: the best pair first, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(symbols))]
        possible = [(score, place) for score, place in pairs if score is not None]
        if not possible:
            return symbols
        i = -max(possible)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(deadline=None, max_examples=300)
@given(text=st.text("ab ", min_size=1, max_size=30), order=st.permutations(range(len(WORDS))))
def test_sentencepiece_merges_by_score(text: str, order: list[int]) -> None:
    scores = [-float(rank) for rank in order]
    expected = join_best_neighbours("▁" + text.replace(" ", "▁"), dict(zip(WORDS, scores, strict=True)))
    assert sentencepiece(scores).encode(text, add_special_tokens=False).tokens == expected


def test_sentencepiece_falls_back_to_bytes() -> None:
    backend = sentencepiece()
    assert backend.encode("é").ids == [
        1,
        len(PIECES) + WORDS.index("▁"),
        3 + 0xC3,
        3 + 0xA9,
    ]
    assert backend.decode(backend.encode("日 é").ids) == "日 é"


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_decode_undoes_encode(prefix: bool, text: str) -> None:
    backend = sentencepiece(add_space_prefix=prefix)
    assert backend.decode(backend.encode(text).ids) == text


def test_sentencepiece_prefix_is_optional() -> None:
    assert sentencepiece().encode("ab", add_special_tokens=False).tokens == ["▁ab"]
    assert sentencepiece(add_space_prefix=False).encode("ab", add_special_tokens=False).tokens == ["ab"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
        ({"scores": None}, "scores must give one number"),
        ({"scores": np.zeros(3)}, "scores must give one number"),
    ],
)
def test_unusable_pieces_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        sentencepiece(**changes)

"""The incremental decoder: joined, its pieces are the full decoding, and no piece ends within a character."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.detokenizer import REPLACEMENT, byte_of_character, bytes_of_token
from engine.model.gguf_file import GGUFFile
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

TEXT = "naïve 日本語 😀👩‍👩‍👧 <|im_end|> العربية\n\té end €"
IDS = st.lists(st.integers(0, 319), max_size=60)


@pytest.fixture(scope="module")
def byte_level(tiny_model: Path) -> Tokenizer:
    return tokenizer_from_folder(tiny_model)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A vocabulary as SentencePiece makes it: words with ▁ for a space, and tokens for single bytes."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "ly",
        "é",
        "日",
    ]
    tokens += [f"w{i}" for i in range(320 - len(tokens))]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_token_ids=frozenset({2}), bos_token_id=1, chat_templates={}, special_tokens={})


def pieces(tokenizer: Tokenizer, chunks: list[list[int]], *, skip: bool) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*(stream.step(chunk) for chunk in chunks), stream.flush()]


@pytest.mark.parametrize("skip", [False, True])
def test_split_everywhere_equals_the_text_without_replacements(byte_level: Tokenizer, skip: bool) -> None:
    ids = byte_level.encode(TEXT, add_special_tokens=False)
    for cut in range(len(ids) + 1):
        parts = pieces(byte_level, [ids[:cut], ids[cut:]], skip=skip)
        assert "".join(parts) == byte_level.decode(ids, skip_special_tokens=skip)
        assert not any(REPLACEMENT in part for part in parts)
    parts = pieces(byte_level, [[id_] for id_ in ids], skip=skip)
    assert "".join(parts) == byte_level.decode(ids, skip_special_tokens=skip)
    assert not any(REPLACEMENT in part for part in parts)


def test_characters_come_as_soon_as_they_are_complete(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a€b", add_special_tokens=False)
    stream = byte_level.stream(skip_special_tokens=True)
    assert [stream.step([id_]) for id_ in ids] == ["a", "", "", "€", "b"]


def test_unfinished_character_is_given_out_at_the_end_only(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é", add_special_tokens=False)[:1]
    assert pieces(byte_level, [ids], skip=True) == ["", REPLACEMENT]


@settings(deadline=None)
@given(ids=IDS, cuts=st.lists(st.integers(0, 60), max_size=10), skip=st.booleans())
def test_any_tokens_in_any_portions_equal_the_full_decoding(
    byte_level: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    chunks = [ids[start:end] for start, end in pairwise(edges)]
    assert "".join(pieces(byte_level, chunks, skip=skip)) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
def test_byte_fallback_text_equals_the_full_decoding(byte_fallback: Tokenizer, text: str) -> None:
    ids = [3 + byte for byte in text.encode()]
    parts = pieces(byte_fallback, [[id_] for id_ in ids], skip=True)
    assert "".join(parts) == byte_fallback.decode(ids, skip_special_tokens=True)
    assert not any(REPLACEMENT in part for part in parts)


def test_byte_fallback_keeps_spaces_between_words_and_strips_the_first(byte_fallback: Tokenizer) -> None:
    ids = [byte_fallback._backend.token_to_id(token) for token in ("▁Hello", "▁world", "ly", "▁", "▁world")]
    parts = pieces(byte_fallback, [[id_] for id_ in ids], skip=True)
    assert parts == ["Hello", " world", "ly", " ", " world", ""]


def test_byte_fallback_bytes_that_are_no_text_are_not_held_for_ever(byte_fallback: Tokenizer) -> None:
    stream = byte_fallback.stream(skip_special_tokens=True)
    shown = [stream.step([3 + 0x80]) for _ in range(50)]
    assert "".join(shown).count(REPLACEMENT) >= 40
    assert "".join(shown) + stream.flush() == byte_fallback.decode([3 + 0x80] * 50, skip_special_tokens=True)


def test_token_str_shows_single_tokens(byte_fallback: Tokenizer, byte_level: Tokenizer) -> None:
    assert byte_fallback.token_str(byte_fallback._backend.token_to_id("▁world")) == " world"
    assert byte_fallback.token_bytes(3 + 0xE2) == b"\xe2"
    assert byte_level.token_str(318) == "<|im_start|>"
    ids = byte_level.encode("€", add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == "€"


def test_byte_table_is_a_bijection() -> None:
    assert sorted(byte_of_character().values()) == list(range(256))
    assert bytes_of_token("Ġhi") == b" hi"
    assert bytes_of_token("<|im_end|>") == b"<|im_end|>"
    assert bytes_of_token("日") == "日".encode()


@pytest.mark.model
@settings(deadline=None, max_examples=50)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_real_tokens_one_by_one_equal_the_full_decoding(smollm2_path: Path, ids: list[int], skip: bool) -> None:
    tokenizer = _real(smollm2_path)
    assert "".join(pieces(tokenizer, [[id_] for id_ in ids], skip=skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


_LOADED: dict[Path, Tokenizer] = {}


def _real(path: Path) -> Tokenizer:
    if path not in _LOADED:
        _LOADED[path] = tokenizer_from_gguf(GGUFFile(path))
    return _LOADED[path]

"""Known ids in place of canonical ones: the text must be the same to the byte, whatever the ids are."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from engine.model.gguf_file import GGUFFile
from engine.sentencepiece_vocabulary import build_pieces
from engine.splice import Spelling
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf
from tests.tiny import IM_END, IM_START

Piece = bytes | int
"""Text, or the id of an added token."""


class Vocabulary:
    """A tokenizer, and what its tokens stand for, found out without the code under test."""

    def __init__(self, tokenizer: Tokenizer, added: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.added = added
        self.by_bytes: dict[bytes, int] = {}
        for token in range(tokenizer.vocab_size):
            if token not in added and (spelled := tokenizer.token_bytes(token)):
                self.by_bytes.setdefault(spelled, token)
        self.longest = max(map(len, self.by_bytes))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids: Sequence[int]) -> list[Piece]:
        """Bytes between added tokens, and these."""
        pieces: list[Piece] = []
        for is_added, group in itertools.groupby(ids, lambda token: token in self.added):
            tokens = list(group)
            pieces += tokens if is_added else [b"".join(map(self.tokenizer.token_bytes, tokens))]
        return pieces

    def stretches(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """The ids between added tokens, one entry around each, empty ones too."""
        found: list[list[int]] = [[]]
        for token in ids:
            if token in self.added:
                found.append([])
            else:
                found[-1].append(token)
        return [tuple(stretch) for stretch in found]

    def recut(self, ids: Sequence[int], rng: random.Random) -> list[int]:
        """Other ids of the same text, as sampling might have cut it."""
        out: list[int] = []
        for piece in self.text(ids):
            if isinstance(piece, int):
                out.append(piece)
            else:
                out += self._cut(piece, rng)
        return out

    def _cut(self, text: bytes, rng: random.Random) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            fitting = [
                size
                for size in range(1, min(self.longest, len(text) - at) + 1)
                if text[at : at + size] in self.by_bytes
            ]
            size = rng.choice(fitting)  # every text here is made of bytes that are tokens
            ids.append(self.by_bytes[text[at : at + size]])
            at += size
        return ids


@lru_cache(maxsize=1)
def tiny_vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(tokenizer_from_folder(folder), frozenset({IM_END, IM_START, 317}))


@lru_cache(maxsize=1)
def real_vocabulary(path: Path) -> Vocabulary:
    return Vocabulary(tokenizer_from_gguf(GGUFFile(path)), frozenset(range(17)))


@pytest.fixture(params=["tiny", pytest.param("real", marks=pytest.mark.model)])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    if request.param == "tiny":
        return tiny_vocabulary(request.getfixturevalue("tiny_model"))
    return real_vocabulary(request.getfixturevalue("smollm2_path"))


SIGNS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FRAGMENTS = [
    *SIGNS,
    *(
        "<|im_",
        "end|>",
        "<",
        "|>",
        " the",
        " hello world",
        "ing",
        "tion",
        "would be",
        "\n",
        "\n\n\n",
        " ",
        "    ",
        "\t\r\n",
    ),
    *(
        "😀",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "日本語",
        "中文字符。",
        "한국어",
        "naïve café",
        "e\u0301",
        "\ufffd",
        "\u3000",
        "العربية",
        "12 345",
        "a" * 9,
    ),
]
LETTERS = st.text(st.sampled_from(" abehlot\n.é日😀"), max_size=8)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | LETTERS, max_size=14).map("".join)
PROPERTY = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(vocabulary: Vocabulary, canonical: list[int], known: list[int]) -> tuple[list[int], int]:
    """Splice, and require all that must hold for any two lists of ids."""
    tokenizer = vocabulary.tokenizer
    before = (list(canonical), list(known))
    spliced, num_spliced = tokenizer.splice(canonical, known)
    assert (canonical, known) == before
    assert vocabulary.text(spliced) == vocabulary.text(canonical)
    for skip in (False, True):
        assert tokenizer.decode(spliced, skip_special_tokens=skip) == tokenizer.decode(
            canonical, skip_special_tokens=skip
        )
    common = common_prefix(canonical, known)
    if num_spliced == 0:
        assert spliced == canonical
    else:
        taken = common + num_spliced
        assert spliced[:taken] == known[:taken]
        rest = len(spliced) - taken
        assert rest == 0 or spliced[taken:] == canonical[-rest:]
    assert tokenizer.splice(spliced, known) == (spliced, 0)
    assert tokenizer.splice(spliced, spliced) == (spliced, 0)
    return spliced, num_spliced


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def searched(vocabulary: Vocabulary, canonical: list[int], known: list[int]) -> list[int] | None:
    """The result if all of `known` spells the beginning of `canonical`, by trying every place."""
    common = common_prefix(canonical, known)
    wanted = vocabulary.text(known[common:])
    for end in range(common, len(canonical) + 1):
        if vocabulary.text(canonical[common:end]) == wanted:
            return known + canonical[end:]
    return None


@PROPERTY
@given(text=TEXTS, rest=TEXTS, seed=st.integers(0, 99))
def test_recut_conversation_is_kept_and_the_rest_is_canonical(
    vocabulary: Vocabulary, text: str, rest: str, seed: int
) -> None:
    known = vocabulary.recut(vocabulary.encode(text), random.Random(seed))
    canonical = vocabulary.encode(text + "<|im_end|>" + rest)
    spliced, num_spliced = check(vocabulary, canonical, known)
    assert spliced == known + vocabulary.encode("<|im_end|>" + rest)
    assert num_spliced == len(known) - common_prefix(canonical, known)


@PROPERTY
@given(text=TEXTS, end=st.integers(0, 60), seed=st.integers(0, 99))
def test_known_ids_that_end_anywhere_are_all_kept_if_there_is_an_edge(
    vocabulary: Vocabulary, text: str, end: int, seed: int
) -> None:
    canonical = vocabulary.encode(text)
    known = vocabulary.recut(canonical, random.Random(seed))[:end]
    spliced, num_spliced = check(vocabulary, canonical, known)
    expected = searched(vocabulary, canonical, known)
    if expected is not None:
        assert spliced == expected
        assert num_spliced == len(known) - common_prefix(canonical, known)


@PROPERTY
@given(old=TEXTS, new=TEXTS, shared=TEXTS, seed=st.integers(0, 99))
def test_no_message_is_mixed_of_known_and_canonical_ids(
    vocabulary: Vocabulary, old: str, new: str, shared: str, seed: int
) -> None:
    known = vocabulary.recut(vocabulary.encode(f"{shared}<|im_end|>{old}<|im_end|>"), random.Random(seed))
    canonical = vocabulary.encode(f"{shared}<|im_end|>{new}<|im_end|>")
    spliced, _ = check(vocabulary, canonical, known)
    stretches = vocabulary.stretches(known)
    for mine, theirs in zip(vocabulary.stretches(spliced), vocabulary.stretches(canonical), strict=True):
        assert mine == theirs or any(known[: len(mine)] == mine for known in stretches)


@PROPERTY
@given(data=st.data())
def test_any_ids_at_all_leave_the_text_alone(vocabulary: Vocabulary, data: st.DataObject) -> None:
    canonical = vocabulary.encode(data.draw(TEXTS))
    token = st.integers(0, vocabulary.tokenizer.vocab_size + 3)
    parts = st.sampled_from([canonical, vocabulary.recut(canonical, random.Random(1))])
    known = data.draw(st.lists(token, max_size=8) | parts.flatmap(lambda ids: edited(ids, token)))
    check(vocabulary, canonical, known)


def edited(ids: list[int], token: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    places = st.integers(0, len(ids))
    return st.tuples(places, places, st.lists(token, max_size=2)).map(lambda e: ids[: e[0]] + e[2] + ids[e[1] :])


def test_what_follows_a_changed_message_is_canonical(tiny_model: Path) -> None:
    """Edit, regenerate, stop string: the known ids are kept up to the last added token before the difference."""
    vocabulary = tiny_vocabulary(tiny_model)
    letters = [vocabulary.encode(letter)[0] for letter in "hello"]
    (hello,) = vocabulary.encode(" hello")[-1:]
    space = vocabulary.encode(" ")
    assert vocabulary.encode(" hello") == [hello] != space + letters
    head, answer = [IM_START], [*space, *letters, IM_END]
    for known, text, kept in (
        (head + answer, "<|im_start|> hello<|im_end|> world", head + answer),
        (head + answer + vocabulary.encode(" what"), "<|im_start|> hello<|im_end|> world", head + answer),
        (head + answer + vocabulary.encode(" what"), "<|im_start|> hello<|im_end|>", head + answer),
        (head + answer[:-1] + vocabulary.encode("STOP"), "<|im_start|> hello<|im_end|>", head + answer[:-1]),
        (head + answer[:-1] + [317], "<|im_start|> hello<|im_end|>", head + answer[:-1]),
        (head + answer, "<|im_start|> hello!<|im_end|>", head),
        (head + answer, "<|im_start|> hell<|im_end|>", head + answer[:5]),
        (head + answer, "<|im_end|> hello<|im_end|>", []),
    ):
        spliced, num_spliced = check(vocabulary, vocabulary.encode(text), known)
        assert spliced[: len(kept)] == kept
        assert num_spliced == (len(kept) - 1 if len(kept) > 1 else 0)


def test_added_token_is_not_the_text_that_reads_like_it(vocabulary: Vocabulary) -> None:
    spelled = [vocabulary.by_bytes[bytes([byte])] for byte in b"<|im_end|>"]
    canonical = vocabulary.encode("<|im_end|>")
    assert canonical != spelled
    assert vocabulary.tokenizer.splice(canonical, spelled) == (canonical, 0)
    assert vocabulary.tokenizer.splice(spelled, canonical) == (spelled, 0)


def test_bytes_that_both_decode_to_a_replacement_character_are_not_equal(vocabulary: Vocabulary) -> None:
    one, other, whole = [vocabulary.by_bytes[b"\xe3"]], [vocabulary.by_bytes[b"\xf0"]], vocabulary.encode("\ufffd")
    decoded = {vocabulary.tokenizer.decode(ids, skip_special_tokens=False) for ids in (one, other, whole)}
    assert decoded == {"\ufffd"}
    for canonical, known in itertools.permutations([one, other, whole], 2):
        assert vocabulary.tokenizer.splice(canonical, known) == (canonical, 0)


def test_ids_no_token_has_are_equal_to_themselves_only(tiny_model: Path) -> None:
    tokenizer = tiny_vocabulary(tiny_model).tokenizer
    assert tokenizer.splice([1, 2], [400, 1, 2]) == ([1, 2], 0)
    assert tokenizer.splice([1, 2], [1, 400, 2]) == ([1, 2], 0)
    assert tokenizer.splice([], [400]) == ([], 0)
    assert tokenizer.splice([1, 2], []) == ([1, 2], 0)


def test_a_hundred_thousand_odd_ids_take_linear_time(vocabulary: Vocabulary) -> None:
    seconds = []
    for times in (2_500, 25_000):
        text = "<|im_start|> hello the world" * times + " hello" * times
        canonical = vocabulary.encode(text)
        known = [token for part in vocabulary.text(canonical) for token in cut_to_bytes(vocabulary, part)]
        started = time.perf_counter()
        spliced, num_spliced = vocabulary.tokenizer.splice(canonical, known)
        seconds.append(time.perf_counter() - started)
        assert (spliced, num_spliced) == (known, len(known) - 1)
    assert len(canonical) >= 100_000
    assert seconds[1] < 10 * 10 * seconds[0] + 0.5  # a quadratic one takes 100 times as long, and 200 s


def cut_to_bytes(vocabulary: Vocabulary, piece: Piece) -> list[int]:
    return [piece] if isinstance(piece, int) else [vocabulary.by_bytes[bytes([byte])] for byte in piece]


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc<unk>é", "ab", "▁a", "▁ab", "bc"]
PIECES = list(dict.fromkeys(PIECES))


def pieces(*, space_prefix: bool = True) -> Vocabulary:
    backend = build_pieces(PIECES, [-float(i) for i in range(len(PIECES))], "<unk>", space_prefix=space_prefix)
    backend.add_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer = Tokenizer(backend, eos_token_ids=frozenset({2}), bos_token_id=1, chat_templates={}, special_tokens={})
    return Vocabulary(tokenizer, frozenset({0, 1, 2}))


@PROPERTY
@given(
    text=st.text(st.sampled_from("abc <unk>é😀▁"), max_size=12),
    rest=st.text(st.sampled_from("ab é😀"), max_size=6),
    seed=st.integers(0, 99),
    space_prefix=st.booleans(),
)
def test_sentencepiece_vocabularies_are_spelled_too(text: str, rest: str, seed: int, space_prefix: bool) -> None:
    vocabulary = pieces(space_prefix=space_prefix)
    canonical = vocabulary.encode(f"{text}</s>{rest}")
    end = canonical.index(2)
    known = vocabulary.recut(canonical[:end], random.Random(seed))
    spliced, num_spliced = check(vocabulary, canonical, known)
    assert spliced == known + canonical[end:]
    assert num_spliced == len(known) - common_prefix(canonical, known)


def test_unknown_token_is_not_the_text_that_reads_like_it() -> None:
    vocabulary = pieces()
    spelled = [PIECES.index(letter) for letter in "<unk>"]
    assert vocabulary.tokenizer.splice([0], spelled) == ([0], 0)
    assert vocabulary.tokenizer.splice(spelled, [0]) == (spelled, 0)


def backend_of(model: models.Model, decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if decoder is not None:
        backend.decoder = decoder
    return backend


VOCABULARY = {"a": 0, "b": 1, "ab": 2}
MERGES = [("a", "b")]


@pytest.mark.parametrize(
    "backend",
    [
        backend_of(models.WordLevel(VOCABULARY, unk_token="a"), decoders.ByteLevel()),
        backend_of(models.BPE(VOCABULARY, MERGES, end_of_word_suffix="b"), decoders.ByteLevel()),
        backend_of(models.BPE(VOCABULARY, MERGES), None),
        backend_of(models.BPE(VOCABULARY, MERGES), decoders.WordPiece()),
        backend_of(models.BPE(VOCABULARY, MERGES), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 9, 0)])),
    ],
)
def test_vocabulary_whose_spelling_is_not_understood_splices_nothing(backend: tokenizers.Tokenizer) -> None:
    spelling = Spelling(backend)
    assert len({spelling[token] for token in range(5)}) == 5
    tokenizer = Tokenizer(backend, eos_token_ids=frozenset(), bos_token_id=None, chat_templates={}, special_tokens={})
    assert tokenizer.splice([2, 0], [0, 1]) == ([2, 0], 0)


def test_the_same_vocabulary_with_a_known_spelling_does() -> None:
    backend = backend_of(models.BPE(VOCABULARY, MERGES), decoders.ByteLevel())
    tokenizer = Tokenizer(backend, eos_token_ids=frozenset(), bos_token_id=None, chat_templates={}, special_tokens={})
    assert tokenizer.splice([2, 0], [0, 1]) == ([0, 1, 0], 2)

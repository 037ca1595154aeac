"""Text from tokens: stop strings are found wherever token edges fall, and nothing is shown too early or lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output import OutputText


class PieceDecoder:
    """Token i is the i-th piece of a text."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces = pieces
        self.tail = tail

    def step(self, ids: list[int]) -> str:
        return "".join(self.pieces[token] for token in ids)

    def flush(self) -> str:
        return self.tail


def run(
    pieces: list[str], stop: list[str], *, include: bool = False, min_tokens: int = 0, tail: str = "", group: int = 1
) -> tuple[str, str | None, int, list[str]]:
    """(text, stop string, tokens that count, the deltas) of pieces pushed `group` at a time."""
    output = OutputText(PieceDecoder(pieces, tail), stop=stop, include_stop=include, min_tokens=min_tokens)
    deltas, found = [], None
    ids = list(range(len(pieces)))
    for start in range(0, max(1, len(ids)), group):
        delta = output.push(ids[start : start + group], last=start + group >= len(ids))
        deltas.append(delta.text)
        found = found or delta.stop_string
    return "".join(deltas), found, output.num_tokens, deltas


def reference(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that ends first (of several, the longest) cuts the text."""
    for end in range(1, len(text) + 1):
        if matches := [s for s in stop if text[:end].endswith(s)]:
            longest = max(matches, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


ALPHABET = st.sampled_from("ab\né🦊")
TEXT = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8), st.booleans(), st.integers(1, 4))
def test_any_split_gives_the_same_answer(
    text: str, stop: list[str], cuts: list[int], include: bool, group: int
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    shown, found, num_tokens, _ = run(pieces, stop, include=include, group=group)
    expected, expected_stop = reference(text, stop, include)
    assert shown == expected
    assert found == expected_stop
    if found is None:
        assert num_tokens == len(pieces)
    else:
        end = len(expected) if include else len(expected) + len(found)
        assert len("".join(pieces[: num_tokens - 1])) < end <= len("".join(pieces[:num_tokens]))


@given(TEXT, STOPS)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    output = OutputText(PieceDecoder(list(text)), stop=stop)
    shown = ""
    for token in range(len(text)):
        delta = output.push([token])
        if delta.stop_string:
            return
        shown += delta.text
        held = text[len(shown) : token + 1]
        assert held == "" or any(len(held) < len(s) and s.startswith(held) for s in stop)


def test_stop_string_across_tokens_is_cut_before_any_of_it_is_shown() -> None:
    text, found, num_tokens, deltas = run(["one", " E", "N", "D two"], ["END"])
    assert (text, found, num_tokens) == ("one ", "END", 4)
    assert deltas == ["one", " ", "", ""]


def test_held_back_text_comes_when_it_was_no_stop_string() -> None:
    _, found, _, deltas = run(["E", "N", "x"], ["END"])
    assert found is None
    assert deltas == ["", "", "ENx"]


def test_held_back_text_comes_at_the_end() -> None:
    assert run(["a", "E", "N"], ["END"])[0] == "aEN"


def test_stop_string_stays_if_asked_for_and_nothing_is_held_back() -> None:
    text, found, _, deltas = run(["a", "E", "N", "D b"], ["END"], include=True)
    assert (text, found) == ("aEND", "END")
    assert deltas == ["a", "E", "N", "D"]


def test_stop_string_within_min_tokens_is_text() -> None:
    assert run(["END", "x", "END"], ["END"], min_tokens=1)[:3] == ("ENDx", "END", 3)


def test_overlapping_occurrence_after_min_tokens_counts() -> None:
    assert run(["aa", "a"], ["aa"], min_tokens=1)[:2] == ("a", "aa")


def test_stop_token_counts_but_is_not_shown() -> None:
    output = OutputText(PieceDecoder(["a", "b", "</s>"]))
    assert output.push([0]).text == "a"
    delta = output.push([1, 2], last=True, hide_last=True)
    assert (delta.text, delta.token_ids, output.num_tokens) == ("b", [1, 2], 3)


def test_incomplete_character_comes_at_the_end() -> None:
    assert run(["a"], [], tail="\ufffd")[0] == "a\ufffd"


def test_tokens_after_the_stop_string_do_not_count() -> None:
    output = OutputText(PieceDecoder(["END", "x"]), stop=["END"])
    assert output.push([0, 1]).token_ids == [0]
    late = output.push([1], last=True)
    assert (late.text, late.token_ids, output.num_tokens) == ("", [], 1)


@pytest.mark.timeout(10)
def test_long_stop_strings_cost_no_more_than_their_text() -> None:
    stop = ["a" * 20_000 + "b"]
    text, found, _, _ = run(["a" * 50] * 2_000, stop)
    assert found is None
    assert len(text) == 100_000

"""Thoughts out of text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.reasoning import Thoughts, thoughts_begun


def parted(parts: list[str], *, begun: bool) -> tuple[str, str]:
    thoughts = Thoughts(begun=begun)
    pieces = [*map(thoughts.push, parts), thoughts.end()]
    return "".join(before for before, _ in pieces), "".join(after for _, after in pieces)


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "\nhm\n", "\n\nYes."),
        ("hm</think>Yes.", True, "hm", "Yes."),
        ("\n <think>hm</think>Yes.", False, "\n hm", "Yes."),
        ("<think>hm", False, "hm", ""),
        ("hm", True, "hm", ""),
        ("hm </thi", True, "hm </thi", ""),
        ("<think>hm</think>Yes.", True, "hm", "Yes."),
        ("\n<thi", True, "\n<thi", ""),
        ("Yes.", False, "", "Yes."),
        ("", False, "", ""),
        (" <thi", False, "", " <thi"),
        (" <thing>", False, "", " <thing>"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("</think>b", True, "", "b"),
        ("a</thi</think>b", True, "a</thi", "b"),
        ("<think></think><think>x</think>", False, "", "<think>x</think>"),
    ],
)
def test_thoughts_and_answer(text: str, begun: bool, reasoning: str, answer: str) -> None:
    assert parted([text], begun=begun) == (reasoning, answer)
    assert parted(list(text), begun=begun) == (reasoning, answer)


def test_thoughts_are_told_as_they_come() -> None:
    thoughts = Thoughts(begun=False)
    parts = ["<thi", "nk>a", "b <", "c </t", "hink", ">d"]
    assert [*map(thoughts.push, parts)] == [("", ""), ("a", ""), ("b ", ""), ("<c ", ""), ("", ""), ("", "d")]


FRAGMENTS = ["<think>", "</think>", "<th", "</th", "ink>", "<", ">", " ", "\n", "words", "é"]


@settings(deadline=None)
@given(
    text=st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)),
    cuts=st.lists(st.integers(0, 80), max_size=5),
    begun=st.booleans(),
)
def test_nothing_is_lost_however_the_text_is_cut(text: str, cuts: list[int], begun: bool) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reasoning, answer = parted([text[a:b] for a, b in itertools.pairwise(places)], begun=begun)
    assert (reasoning, answer) == parted([text], begun=begun)
    tags = {f"{opened}{reasoning}{closed}{answer}" for opened in ("", "<think>") for closed in ("", "</think>")}
    lead = len(reasoning) - len(reasoning.lstrip())
    tags |= {f"{reasoning[:at]}<think>{reasoning[at:]}{c}{answer}" for at in range(lead + 1) for c in ("", "</think>")}
    assert text in tags


@pytest.mark.parametrize(
    ("end", "begun"),
    [
        ("assistant\n<think>\n", True),
        ("assistant\n<think>", True),
        ("assistant\n<think>half a thought", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("assistant\n", False),
        ("", False),
    ],
)
def test_what_the_prompt_ends_in(end: str, begun: bool) -> None:
    assert thoughts_begun(end) is begun

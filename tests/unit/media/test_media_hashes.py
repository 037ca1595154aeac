"""Names of blocks with pictures in them: KV of different pictures never mixes, and text keeps its names."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.hashing import hash_block, hash_seed
from engine.media.item import MediaItem
from engine.request import Request, SamplingParams

SIZE = 4
PLACEHOLDER = 7
ROWS = 6
"""Of every picture here."""

Piece = str | list[int]
"""A picture by its name, or tokens of text."""
pieces: st.SearchStrategy[list[Piece]] = st.lists(
    st.one_of(st.sampled_from(["ab", "cd", "abcd"]), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


def request(prompt: Sequence[Piece], output: Sequence[int] = ()) -> Request:
    ids: list[int] = []
    media = []
    for piece in prompt:
        if isinstance(piece, str):
            # As tiles have it, with a token of another kind between the placeholders.
            places = [len(ids) + place for place in (0, 1, 2, 4, 5, 6)]
            media.append(MediaItem(piece, tuple(places), {}))
            ids += [PLACEHOLDER] * 3 + [3] + [PLACEHOLDER] * 3
        else:
            ids += piece
    made = Request("r", ids, SamplingParams(), frozenset(), SIZE, b"seed", media=media)
    for token in output:
        made.append(token)
    return made


def content(made: Request, stop: int) -> list[object]:
    """What the first tokens stand for."""
    shown = {place: (item.identifier, row) for item in made.media for row, place in enumerate(item.positions)}
    return [shown.get(place, token) for place, token in enumerate(made.token_ids[:stop])]


@settings(max_examples=150, deadline=None)
@given(pieces, pieces)
def test_equal_names_mean_equal_tokens_and_equal_pictures(one: list[Piece], other: list[Piece]) -> None:
    first, second = request(one), request(other)
    for length in range(1, min(first.num_tokens, second.num_tokens) + 1):
        same = content(first, length) == content(second, length)
        assert (first.hash_chain(length)[-1] == second.hash_chain(length)[-1]) == same
    for index, (ours, theirs) in enumerate(zip(first.block_hashes, second.block_hashes, strict=False)):
        stop = (index + 1) * SIZE
        assert (ours == theirs) == (content(first, stop) == content(second, stop))


@settings(max_examples=100, deadline=None)
@given(pieces, st.lists(st.integers(0, 9), max_size=9))
def test_names_do_not_depend_on_how_a_sequence_came_to_be(prompt: list[Piece], output: list[int]) -> None:
    grown, whole = request(prompt, output), request([*prompt, output])
    assert grown.block_hashes == whole.block_hashes
    assert grown.hash_chain(grown.num_tokens) == whole.hash_chain(whole.num_tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=30))
def test_text_has_the_names_it_always_had(ids: list[int]) -> None:
    made = Request("r", ids, SamplingParams(), frozenset(), SIZE, hash_seed(b"model"))
    parent = hash_seed(b"model")
    for index, name in enumerate(made.block_hashes):
        parent = hash_block(parent, ids[index * SIZE : (index + 1) * SIZE])
        assert name == parent

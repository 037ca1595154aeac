"""Lists of token ids from outside, and the forms they travel in."""

from __future__ import annotations

import hashlib
from array import array

import orjson
import pytest

from connectors.wire.ids import TokenIds

NO_IDS = [True, False, 1.0, "1", None, [1], {}, -1, 2**32, 2**70, -(2**70)]


@pytest.mark.parametrize("ids", [[0], [1, 2, 3], [2**32 - 1, 0], list(range(10_000))])
def test_ids_have_the_same_forms_wherever_they_come_from(ids: list[int]) -> None:
    text = orjson.dumps(ids)
    for made in (TokenIds.of(ids), TokenIds.read(text), TokenIds.made_of(array("I", ids))):
        assert made is not None
        assert (made.numbers.tolist(), made.text, len(made)) == (ids, text, len(ids))
        assert made.digest() == hashlib.sha256(array("I", ids).tobytes()).digest()
        assert made == TokenIds(array("I", ids), text)
        assert TokenIds.of(made) is made
        assert repr(made) == f"TokenIds({len(ids)})"


@pytest.mark.parametrize("text", [b"[1, 2,3]", b"[1,2,\n3]", b"[1,2,3\t]", b"[1,2\r,3]", b"[1,2,3]"])
def test_odd_text_is_written_anew(text: bytes) -> None:
    made = TokenIds.read(text)
    assert made is not None
    assert made.text == b"[1,2,3]"
    assert made == TokenIds.of([1, 2, 3])
    assert made != TokenIds.of([1, 2])
    assert made != [1, 2, 3]


def test_minus_zero_is_zero() -> None:
    made = TokenIds.read(b"[-0,5]")
    assert made is not None
    assert (made.text, made.numbers.tolist()) == (b"[0,5]", [0, 5])


@pytest.mark.parametrize("one", NO_IDS)
def test_one_that_is_no_id_makes_it_none(one: object) -> None:
    for ids in ([1, one, 2], [one]):
        assert TokenIds.of(ids) is None
        try:
            assert TokenIds.read(orjson.dumps(ids)) is None
        except TypeError:
            assert isinstance(one, int)  # too large to be written


@pytest.mark.parametrize("value", [None, [], (), (1, 2), "12", b"12", 5, {1: 2}])
def test_what_is_no_list_of_any_is_none(value: object) -> None:
    assert TokenIds.of(value) is None


@pytest.mark.parametrize(
    "text", [b"", b"[", b"[]", b"[1", b"[1]]", b"1", b'"12"', b"{}", b"null", b"[1e3]", b"[1.0]", b"[[1]]"]
)
def test_what_is_no_json_of_a_list_of_any_is_none(text: bytes) -> None:
    assert TokenIds.read(text) is None

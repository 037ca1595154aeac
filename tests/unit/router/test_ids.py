"""Lists of token ids from outside."""

from __future__ import annotations

import pytest

from router.ids import ids_or_none


@pytest.mark.parametrize("ids", [[0], [1, 2, 3], [2**32 - 1, 0], list(range(10_000))])
def test_ids_come_back_as_they_are(ids: list[int]) -> None:
    assert ids_or_none(ids) is ids


@pytest.mark.parametrize("one", [True, False, 1.0, "1", None, [1], {}, -1, 2**32, 2**70, -(2**70)])
def test_one_that_is_no_id_makes_it_none(one: object) -> None:
    assert ids_or_none([1, one, 2]) is None
    assert ids_or_none([one]) is None


@pytest.mark.parametrize("value", [None, [], (), (1, 2), "12", b"12", 5, {1: 2}])
def test_what_is_no_list_of_any_is_none(value: object) -> None:
    assert ids_or_none(value) is None

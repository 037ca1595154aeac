"""Ids that are cut out of answers: the same as if all had been read at once."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.wire.ids import TokenIds
from router import ids as answers
from router import jsontext
from router.ids import PROMPT_IDS, TOKENS, WORTH_BYTES, read_answer

IDS = list(range(7, 2000))
FILL = "x" * WORTH_BYTES


def plain(value: Any) -> Any:
    """With lists for TokenIds."""
    return orjson.loads(jsontext.dumps(value))


@pytest.mark.parametrize("place", [(), ("choices", 0), ("token_note",)])
@pytest.mark.parametrize("key", [PROMPT_IDS, TOKENS])
def test_ids_are_read_where_engines_put_them(place: tuple[str | int, ...], key: str) -> None:
    holder: dict[str, Any] = {"a": [1, 2], key: IDS, "z": {key: "]"}}
    answer: Any = holder
    for part in reversed(place):
        answer = [answer] if part == 0 else {"b": "c", str(part): answer}
    body = read_answer(orjson.dumps(answer), key)
    found: Any = body
    for part in place:
        found = found[part]
    assert isinstance(found[key], TokenIds)
    assert found[key].numbers.tolist() == IDS
    assert plain(body) == answer


def test_known_ids_are_recognised_and_others_are_not() -> None:
    known = TokenIds.of(IDS)
    data = orjson.dumps({PROMPT_IDS: IDS, "fill": FILL})
    assert read_answer(data, known=known)[PROMPT_IDS] is known
    for other in (IDS[:-1], [*IDS, 5], [6, *IDS[1:]]):
        found = read_answer(orjson.dumps({PROMPT_IDS: other, "fill": FILL}), known=known)[PROMPT_IDS]
        assert found.numbers.tolist() == other
    spaced = json.dumps({"fill": FILL, PROMPT_IDS: IDS}, separators=(", ", ":")).encode()
    assert TokenIds.of(read_answer(spaced, known=known)[PROMPT_IDS]) == known


@pytest.mark.parametrize(
    "answer",
    [
        {"kv_transfer_params": {PROMPT_IDS: IDS}, "fill": FILL},
        {"kv_transfer_params": {PROMPT_IDS: IDS}, PROMPT_IDS: [1, 2], "fill": FILL},
        {"choices": [{}, {PROMPT_IDS: IDS}], "fill": FILL},
        {"choices": {PROMPT_IDS: IDS}, "fill": FILL},
        [{PROMPT_IDS: IDS}, FILL],
        {PROMPT_IDS: [], "fill": FILL},
        {PROMPT_IDS: [*IDS, True]},
        {PROMPT_IDS: [*IDS, 1.5]},
        {PROMPT_IDS: [*IDS, "]"], "fill": FILL},
        {PROMPT_IDS: [IDS, IDS], "fill": FILL},
        {PROMPT_IDS: [{"a": IDS}], "fill": FILL},
        {PROMPT_IDS: None, "fill": FILL},
        {"fill": f'{FILL}","{PROMPT_IDS}":[1,2,3]'},
        {f'{{"{PROMPT_IDS}': IDS, "fill": FILL},
        {"fill": FILL, f'a,"{PROMPT_IDS}': IDS},
        {"fill": answers._STAND_IN, PROMPT_IDS: IDS},
    ],
)
def test_whatever_else_there_is_reads_as_without_a_cut(answer: Any) -> None:
    data = orjson.dumps(answer)
    assert plain(read_answer(data)) == answer
    assert plain(read_answer(data, known=TokenIds.of([1, 2, 3]))) == answer


@pytest.mark.parametrize("end", [b"", b"}", b"]", b"],", b"]}}", b"],}", b'],"a":NaN}', b'],"a":"\\ud800"}'])
def test_what_is_no_json_is_none_and_leniency_stays(end: bytes) -> None:
    data = b'{"fill":"%b","%b":[%b' % (FILL.encode(), PROMPT_IDS.encode(), b",".join(b"%d" % one for one in IDS)) + end
    try:
        expected = jsontext.loads(data)
    except ValueError:
        with pytest.raises(ValueError):
            read_answer(data)
    else:
        got = read_answer(data)
        assert got.keys() == expected.keys()
        assert TokenIds.of(got[PROMPT_IDS]) == TokenIds.of(IDS)


def test_a_list_given_twice_is_the_later_one_as_always() -> None:
    first, second = orjson.dumps(IDS), orjson.dumps(IDS[::-1])
    data = b'{"%b":%b,"%b":%b}' % (PROMPT_IDS.encode(), first, PROMPT_IDS.encode(), second)
    assert plain(read_answer(data)) == {PROMPT_IDS: IDS[::-1]}


LEAVES = st.sampled_from([None, True, False, 0, 7, -1, 2**33, 1.5, "", "]", ",", '"']) | st.text(max_size=4)
KEYS = st.sampled_from([PROMPT_IDS, TOKENS, "choices", "token_note", "a", '"', f',"{PROMPT_IDS}'])
VALUES = st.recursive(
    LEAVES | st.lists(st.integers(0, 9), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5), st.sampled_from([PROMPT_IDS, TOKENS]), st.booleans())
def test_any_answer_reads_as_without_a_cut(answer: dict[str, Any], key: str, is_known: bool) -> None:
    data = orjson.dumps({**answer, "fill": FILL})
    known = TokenIds.of([1, 2, 3]) if is_known else None
    assert plain(read_answer(data, key, known)) == orjson.loads(data)

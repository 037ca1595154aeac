"""Lists of token ids from outside, of whatever length: checked without a loop in Python."""

from __future__ import annotations

from array import array
from typing import Final

import orjson

ID_TYPE: Final = "I"


def ids_or_none(value: object) -> list[int] | None:
    """A list of token ids, or None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    try:
        array(ID_TYPE, value)  # refuses all but integers that fit, and true, which it takes for 1
    except (TypeError, OverflowError):
        return None
    return None if b"e" in orjson.dumps(value) else value  # true and false have an e, numbers have none

"""What engines call their models, where it is shown or counted: as much of it as can be of use."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

MAX_CHARS: Final = 256
MAX_LISTED: Final = 5


def shown(name: str) -> str:
    return name if len(name) <= MAX_CHARS else name[: MAX_CHARS - 1] + "…"


def listed(names: Iterable[str]) -> str:
    """In a log line, or on a terminal."""
    rest = iter(names)
    first = [name if name.isprintable() else repr(name) for name in map(shown, islice(rest, MAX_LISTED))]
    more = sum(1 for _ in rest)
    return ", ".join(first or ["no model"]) + (f" and {more} more" if more else "")

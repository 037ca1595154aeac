"""The turns being served, by the id their client knows them by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.request import Turn

_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_")
"""What engines put before a request's id to make the id of its answer."""


class Running:
    """Turns by tenant and request id; one client may use an id more than once."""

    def __init__(self) -> None:
        self._turns: defaultdict[tuple[str, str], list[Turn]] = defaultdict(list)

    @contextmanager
    def serve(self, turn: Turn) -> Iterator[None]:
        """While the turn lasts it can be found."""
        key = (turn.tenant, turn.report.request_id)
        self._turns[key].append(turn)
        try:
            yield
        finally:
            self._turns[key].remove(turn)
            if not self._turns[key]:
                del self._turns[key]

    def find(self, tenant: str, name: str) -> list[Turn]:
        """The turns with this request id, or whose answer has this id."""
        names = {name, *(name.removeprefix(prefix) for prefix in _PREFIXES)}
        return [turn for each in names for turn in self._turns.get((tenant, each), ())]

"""The turns being served, by the id their client knows them by."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.request import Turn

_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_")
"""What engines put before a request's id to make the id of its answer."""


class Running:
    """Turns by tenant and request id; one client may use an id more than once."""

    def __init__(self) -> None:
        self._turns: defaultdict[tuple[str, str], list[Turn]] = defaultdict(list)

    def add(self, turn: Turn) -> None:
        """From here on the turn can be found, until it is removed."""
        self._turns[turn.tenant, turn.report.request_id].append(turn)

    def remove(self, turn: Turn) -> None:
        key = (turn.tenant, turn.report.request_id)
        self._turns[key].remove(turn)
        if not self._turns[key]:
            del self._turns[key]

    def find(self, tenant: str, name: str) -> list[Turn]:
        """The turns with this request id, or whose answer has this id."""
        names = {name, *(name.removeprefix(prefix) for prefix in _PREFIXES)}
        return [turn for each in names for turn in self._turns.get((tenant, each), ())]

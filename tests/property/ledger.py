"""Every token sequence whose KV can lie on an engine: nothing may be reused beyond what a prompt has in common with
them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_BYTES = 2


@dataclass(slots=True)
class Visit:
    """One request, from when it is sent until its answer is read; while two are open, either may use the other's KV."""

    index: int
    concurrent: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Doubt:
    """More was reused than any finished request explains; perhaps one that ran at the same time does."""

    scope: Hashable
    ids: bytes
    reused: int
    concurrent: frozenset[int]
    what: str


class Ledger:
    def __init__(self) -> None:
        self._sorted: defaultdict[Hashable, list[bytes]] = defaultdict(list)
        self._by_visit: defaultdict[tuple[Hashable, int], list[bytes]] = defaultdict(list)
        self._open: dict[int, Visit] = {}
        self._num_visits = 0
        self._doubts: list[_Doubt] = []

    @contextmanager
    def visit(self) -> Iterator[Visit]:
        self._num_visits += 1
        visit = Visit(self._num_visits, set(self._open))
        for other in self._open.values():
            other.concurrent.add(visit.index)
        self._open[visit.index] = visit
        try:
            yield visit
        finally:
            del self._open[visit.index]

    def note(self, visit: Visit, ids: Sequence[int], *scopes: Hashable) -> None:
        """An engine has computed these tokens, or may have."""
        packed = _pack(ids)
        for scope in scopes:
            self._by_visit[scope, visit.index].append(packed)
            known = self._sorted[scope]
            place = bisect_left(known, packed)
            if place == len(known) or known[place] != packed:
                insort(known, packed)

    def check(self, visit: Visit, scope: Hashable, ids: Sequence[int], reused: int, what: str) -> None:
        """`reused` tokens of this prompt were not computed: some sequence must begin with them. Call it before the
        request's own sequence is noted."""
        packed = _pack(ids)
        if reused > self.longest_common(scope, packed):
            self._doubts.append(_Doubt(scope, packed, reused, frozenset(visit.concurrent), what))

    def longest_common(self, scope: Hashable, packed: bytes) -> int:
        """Tokens `packed` has in common with a known sequence, from the start."""
        known = self._sorted[scope]
        place = bisect_left(known, packed)
        return max((_common(packed, other) for other in known[max(0, place - 1) : place + 1]), default=0)

    def unexplained(self) -> list[str]:
        """Reuse that no request explains, now that all have ended."""
        return [doubt.what for doubt in self._doubts if not self._explained(doubt)]

    def _explained(self, doubt: _Doubt) -> bool:
        return any(
            _common(doubt.ids, other) >= doubt.reused
            for visit in doubt.concurrent
            for other in self._by_visit.get((doubt.scope, visit), ())
        )


def _pack(ids: Sequence[int]) -> bytes:
    """Big-endian, so that the order of the bytes is that of the tokens."""
    packed = array("H", ids)
    packed.byteswap()
    return packed.tobytes()


def _common(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // _BYTES
    low, high = 0, size  # one[:low] is common, one[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle
    return low // _BYTES

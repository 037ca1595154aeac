"""What a run has shown: counts with their goals, what failed, and the faults meanwhile; as text, Markdown or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.property.tally import Tally

MAX_LISTED = 100
NEVER = ("wrong answer", "failed before the first byte", "cut without an error event", "refused")
"""What must not happen to a turn while a prefill engine, a decode engine and a router live."""
GOALS = {
    "blocks held at the end": 0,
    "turns in flight at the end": 0,
    "keys without TTL at the end": 0,
}


@dataclass(frozen=True)
class Failure:
    kind: str
    at: float
    """time.monotonic()"""
    seconds: float
    where: str
    what: str
    request_id: str
    faults: str
    """Those in the fleet at that time."""


@dataclass
class Results:
    title: str
    tally: Tally = field(default_factory=Tally)
    failures: list[Failure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is wrong, but of no single turn."""
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of faults by (kind, part)."""
    facts: dict[str, str] = field(default_factory=dict)
    """Measured, with no goal that a busy machine could be held to."""
    growth: list[str] = field(default_factory=list)

    def failed(self, failure: Failure) -> None:
        self.tally[failure.kind] += 1
        self.failures.append(failure)

    @property
    def passed(self) -> bool:
        return not (self.failures or self.problems or any(self.tally[name] > goal for name, goal in GOALS.items()))

    def rows(self) -> list[tuple[str, int, str]]:
        """Name, count, and the goal, if there is one."""
        goals = dict.fromkeys(NEVER, 0) | GOALS
        names = [name for name in self.tally if name not in goals]
        return [(name, self.tally[name], "") for name in names] + [
            (name, self.tally[name], str(goal)) for name, goal in goals.items()
        ]

    def text(self) -> str:
        rows = [
            f"  {name:<58}{count:>9}  {f'goal {goal}' if goal else ''}".rstrip() for name, count, goal in self.rows()
        ]
        facts = [f"  {name}: {value}" for name, value in self.facts.items()]
        return "\n".join([self.title, *rows, *facts, *self.growth, *self.complaints()])

    def complaints(self) -> list[str]:
        told = [
            f"{one.kind} ({one.where}, after {one.seconds:.2f} s, id {one.request_id}): {one.what}; "
            f"faults: {one.faults}"
            for one in self.failures[:MAX_LISTED]
        ]
        return told + self.problems[:MAX_LISTED]

    def markdown(self) -> str:
        return "\n".join(
            [
                f"# {self.title}",
                "",
                *_table(("", "count", "goal"), self.rows()),
                "",
                *_table(("measured", ""), list(self.facts.items())),
                "",
                "## Faults",
                "",
                *self._fault_table(),
                "",
                "## Growth of processes that lived from one quiet point to the next",
                "",
                *[f"- {line}" for line in self.growth],
                "",
                "## What went wrong",
                "",
                *([f"- {' '.join(line.split())}" for line in self.complaints()] or ["Nothing."]),
                "",
            ]
        )

    def _fault_table(self) -> list[str]:
        kinds = sorted({kind for kind, _ in self.faults})
        parts = sorted({part for _, part in self.faults})
        return _table(("part", *kinds), [(part, *(self.faults[kind, part] for kind in kinds)) for part in parts])

    def as_json(self) -> str:
        told: dict[str, Any] = {
            "title": self.title,
            "passed": self.passed,
            "counts": dict(self.tally),
            "facts": self.facts,
            "faults": [{"kind": kind, "part": part, "count": count} for (kind, part), count in self.faults.items()],
            "growth": self.growth,
            "failures": [asdict(failure) for failure in self.failures],
            "problems": self.problems,
        }
        return json.dumps(told, indent=1)


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]

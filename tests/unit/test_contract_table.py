"""docs/vllm-contract.md and the tests tell the same: what the table names exists, and what exists is in the table."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "vllm-contract.md"
NUM_ITEMS = 131
STATUSES = ("covered", "covered differently", "does not apply", "not yet")
NAME = re.compile(r"`(test_\w+)::(test_\w+)`")


@dataclass(frozen=True)
class Row:
    number: int
    behaviour: str
    status: str
    where: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        return NAME.findall(self.where)


def rows() -> list[Row]:
    found = []
    for line in TABLE.read_text().splitlines():
        if re.match(r"\| \d+ \|", line):
            number, behaviour, status, where = (cell.strip() for cell in line.strip("|").split("|"))
            found.append(Row(int(number), behaviour, status, where))
    return found


@cache
def names_in(module: str) -> frozenset[str]:
    (path,) = (ROOT / "tests").rglob(f"{module}.py")
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in nodes if isinstance(node, kinds) and node.name.startswith("test_"))


def test_every_item_has_its_row_in_order() -> None:
    assert [row.number for row in rows()] == list(range(1, NUM_ITEMS + 1))
    assert all(row.behaviour for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.number:03}")
def test_row(row: Row) -> None:
    assert row.status in STATUSES
    if row.status.startswith("covered"):
        assert row.tests, "covered by what?"
    else:
        assert NAME.sub("", row.where).strip(" ,;"), "why not?"
    if row.status == "covered differently":
        assert NAME.sub("", row.where).strip(" ,;"), "how does it differ?"
    assert len(NAME.findall(row.where)) == row.where.count("`test_"), "a test is written `module::name`"
    for module, name in row.tests:
        assert name in names_in(module), f"{module} has no {name}"


def test_every_numbered_test_is_in_the_row_of_its_number() -> None:
    named = {(row.number, test) for row in rows() for _, test in row.tests}
    for path in sorted((ROOT / "tests" / "contract").glob("test_*.py")):
        for test in names_in(path.stem):
            if match := re.match(r"test_item_(\d+)_", test):
                assert (int(match[1]), test) in named, f"{path.stem}::{test} is missing from row {int(match[1])}"


def test_summary_counts_the_rows() -> None:
    counts = Counter(row.status for row in rows())
    text = TABLE.read_text()
    for status in STATUSES:
        assert f"| {status} | {counts[status]} |" in text

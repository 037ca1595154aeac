"""What values.yaml says of each value: the comment above it, and its default. The chart's README is made of it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import yaml

WIDEST_DEFAULT: Final = 120


@dataclass(frozen=True, slots=True)
class Value:
    path: str
    default: object
    text: str


def documented(source: str) -> Iterator[Value]:
    """Every value that has a comment. Raises ValueError for one that has none, nor any within or around it."""
    root = yaml.compose(source)
    assert isinstance(root, yaml.MappingNode)
    yield from _within(root, source.splitlines(), "")


def _within(mapping: yaml.MappingNode, lines: Sequence[str], prefix: str) -> Iterator[Value]:
    for key, node in mapping.value:
        path = f"{prefix}{key.value}"
        text = _comment(lines, key.start_mark.line)
        if isinstance(node, yaml.MappingNode) and not node.flow_style and not _is_pass_through(node, lines):
            yield from _within(node, lines, f"{path}.")
        elif text:
            yield Value(path, yaml.SafeLoader("").construct_document(node), text)
        else:
            raise ValueError(f"values.yaml, line {key.start_mark.line + 1}: {path} has no comment")


def _is_pass_through(mapping: yaml.MappingNode, lines: Sequence[str]) -> bool:
    """Whether its keys are those of Kubernetes, and none has a comment."""
    return not any(
        _comment(lines, key.start_mark.line)
        or (isinstance(node, yaml.MappingNode) and not node.flow_style and not _is_pass_through(node, lines))
        for key, node in mapping.value
    )


def _comment(lines: Sequence[str], line: int) -> str:
    """What stands right above."""
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(one.strip().removeprefix("#").strip() for one in lines[first:line])


def table(source: str) -> str:
    rows = [
        f"| `{one.path}` | {_cell(one.default)} | {one.text.replace('|', chr(92) + '|')} |"
        for one in documented(source)
    ]
    return "\n".join(["| value | default | |", "| --- | --- | --- |", *rows])


def _cell(default: object) -> str:
    if default is None or default == "":
        return ""
    text = json.dumps(default) if not isinstance(default, str) else default
    return f"`{textwrap.shorten(text, WIDEST_DEFAULT, placeholder=' …')}`"


def with_table(page: str, source: str) -> str:
    """The page, with the table of now between its two marks."""
    return between(page, "values", table(source))


def between(page: str, mark: str, text: str) -> str:
    """The page, with this text between `<!-- mark -->` and `<!-- end of mark -->`."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"the page has no {begin} and {end}"
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"

"""What a Dockerfile says, as far as ours go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from deploy.lock import ROOT

IGNORED: Final = [
    line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
]


@dataclass(frozen=True, slots=True)
class Copy:
    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True, slots=True)
class Dockerfile:
    text: str

    @property
    def instructions(self) -> list[tuple[str, str]]:
        lines = [line for line in self.text.splitlines() if not line.lstrip().startswith("#")]
        joined = "\n".join(lines).replace("\\\n", " ")
        found = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
        return [(word.upper(), " ".join(rest.split())) for word, rest in found]

    def of(self, word: str) -> list[str]:
        return [rest for known, rest in self.instructions if known == word]

    @property
    def copies(self) -> Iterator[Copy]:
        """Of what lies in the repository."""
        for rest in self.of("COPY"):
            if not rest.startswith("--from="):
                *sources, target = rest.split()
                yield Copy(tuple(sources), target)

    @property
    def command(self) -> list[str]:
        return [word for known in ("ENTRYPOINT", "CMD") for word in json.loads(self.of(known)[-1])]

    def copy_into(self, folder: Path) -> None:
        for copy in self.copies:
            for source in copy.sources:
                target = folder / (Path(source).name if copy.target == "./" else copy.target)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, target)


def is_sent(source: str) -> bool:
    """Whether the builder sees it, by .dockerignore."""
    sent = True
    for pattern in IGNORED:
        negated, name = pattern.startswith("!"), pattern.lstrip("!")
        if fnmatch(source, name) or source.startswith(name + "/"):
            sent = negated
    return sent

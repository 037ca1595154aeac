"""What `up` shows while its parts start: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO


class Part(Protocol):
    """One line of the display: something that starts and is then ready."""

    def update(self, detail: str) -> None: ...

    def ready(self, detail: str) -> None: ...


class Display(Protocol):
    def part(self, name: str, detail: str) -> Part:
        """Show that `name` has begun."""
        ...


@contextmanager
def open_display(stream: TextIO | None = None) -> Iterator[Display]:
    """Open the display that fits `stream` (stderr)."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield PlainDisplay(stream)
        return
    try:
        live = LiveDisplay(stream)
    except ImportError:  # rich comes with the extra "embedded"; without it lines will do
        yield PlainDisplay(stream)
        return
    with live.progress:
        yield live


class PlainDisplay:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def part(self, name: str, detail: str) -> Part:
        self.line(f"{name}: {detail}")
        return _PlainPart(self, name)

    def line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class _PlainPart:
    def __init__(self, display: PlainDisplay, name: str) -> None:
        self.display = display
        self.name = name
        self.began = time.monotonic()
        self.shown = self.began

    def update(self, detail: str) -> None:
        """Say it at most every five seconds: a log is no progress bar."""
        now = time.monotonic()
        if now - self.shown >= 5.0:
            self.shown = now
            self.display.line(f"{self.name}: {detail}")

    def ready(self, detail: str) -> None:
        self.display.line(f"{self.name}: {detail} ({time.monotonic() - self.began:.1f} s)")


class LiveDisplay:
    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
            console=Console(file=stream),
        )

    def part(self, name: str, detail: str) -> Part:
        return _LivePart(self, name, detail)


class _LivePart:
    def __init__(self, display: LiveDisplay, name: str, detail: str) -> None:
        self.progress = display.progress
        self.task = self.progress.add_task(name, total=1, detail=detail)

    def update(self, detail: str) -> None:
        self.progress.update(self.task, detail=detail)

    def ready(self, detail: str) -> None:
        self.progress.update(self.task, detail=detail, completed=1)

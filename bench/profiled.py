"""Where a server's time goes, for `bench.router --profile`: Python calls, and their time, per turn.

    python -m bench.profiled FILE MODULE ARGUMENTS…

Runs a module under cProfile while its event loop runs. Its clock makes small functions look dear, but the number of
calls is the same on a busy machine as on a quiet one.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import runpy
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

SHOWN = 15


def table(file: Path, turns: int) -> Iterator[str]:
    """A profile's lines: everything per turn."""
    calls: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    own: defaultdict[str, float] = defaultdict(float)
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(str(file)).stats  # type: ignore[attr-defined]
    for (path, line, name), (_, count, seconds, *_) in stats.items():
        function = f"{_package(path)} {Path(path).name}:{line} {name}" if line else name
        calls[function] += count
        own[function] += seconds
        packages[_package(path)] += count
    yield f"{calls.total() / turns:,.0f} calls per turn, of {turns:,} turns: " + ", ".join(
        f"{package} {count / turns:,.0f}" for package, count in packages.most_common(SHOWN)
    )
    total = sum(own.values())
    for function, seconds in sorted(own.items(), key=lambda item: -item[1])[:SHOWN]:
        yield f"{seconds / total:6.1%} {calls[function] / turns:7.1f} calls  {function}"


def _package(path: str) -> str:
    """Ours and those of site-packages by their top folder, modules written in C as one."""
    parts = Path(path).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1]
    return parts[-2] if len(parts) > 1 else "C"


def main() -> None:
    file, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    profile = cProfile.Profile(time.thread_time)  # the time that it waits is nobody's
    run = asyncio.Runner.run

    def profiled(runner: asyncio.Runner, work: Coroutine[Any, Any, Any]) -> Any:
        with profile:
            return run(runner, work)

    asyncio.Runner.run = profiled  # type: ignore[assignment, method-assign]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        profile.dump_stats(file)


if __name__ == "__main__":
    main()

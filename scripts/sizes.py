"""Print how long the files of each package are: a feel for where one has begun to do two things."""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path

PACKAGES = ("backhaul", "router", "connectors", "engine", "bench", "tests")
LONG = 400


def main() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    files = [Path(name) for name in listed if Path(name).is_file()] or [
        path for package in PACKAGES for path in Path(package).rglob("*.py")
    ]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    print(f"{'package':<12}{'files':>6}{'lines':>8}{'median':>8}{'longest':>9}")
    for package in PACKAGES:
        sizes = sorted(size for path, size in lines.items() if path.parts[0] == package and size)
        if sizes:
            print(f"{package:<12}{len(sizes):>6}{sum(sizes):>8}{statistics.median(sizes):>8.0f}{sizes[-1]:>9}")
    for path, size in sorted(lines.items(), key=lambda item: -item[1]):
        if size > LONG:
            print(f"long: {path} ({size} lines)")


if __name__ == "__main__":
    main()

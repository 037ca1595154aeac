"""The equality property with new random histories for as long as you like, or again with one that failed.

python -m tests.property.soak [--seconds 600] [--seed N]       histories N, N+1, …; default: a random start
python -m tests.property.soak --replay FILE [--times 20]       the History(…) a failure printed, from a file
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.property import script
from tests.property.campaign import campaign
from tests.property.fleet import fleet
from tests.property.reference import Reference
from tests.property.script import History, history
from tests.property.talker import make_talker

ROUND_SECONDS = 60.0
"""Engines, routers and the record of what was computed are made anew this often."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="backhaul-soak-") as name:
        model = make_talker(Path(name) / "talker")
        reference = Reference(model)
        if args.replay is not None:
            _round(Path(name), model, reference, [_read(args.replay)] * args.times, None)
            return 0
        print(f"histories from seed {args.seed} on, for {args.seconds:g} s", flush=True)
        seeds, end = itertools.count(args.seed), time.monotonic() + args.seconds
        while (left := end - time.monotonic()) > 0:
            _round(Path(name), model, reference, map(history, seeds), min(left, ROUND_SECONDS))
    return 0


def _round(
    folder: Path, model: Path, reference: Reference, histories: Iterable[History], seconds: float | None
) -> None:
    logs = Path(tempfile.mkdtemp(dir=folder))
    with fleet(model, logs) as started:
        asyncio.run(campaign(started, reference, histories, seconds=seconds))


def _read(path: Path) -> History:
    """The developer's own file: evaluated as the Python it is."""
    read = eval(path.read_text(), {name: getattr(script, name) for name in ("History", "Turn", "Edit")})
    assert isinstance(read, History), f"{path}: a History(…) expected"
    return read


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AssertionError as failure:
        print(failure, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

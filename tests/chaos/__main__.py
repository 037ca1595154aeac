"""Faults at random against a whole small deployment under load, for as long as you like; a report says what it cost.

python -m tests.chaos [--minutes 30] [--seed N] [--rounds N] [--clients 24] [--report FILE.md] [--no-sentinel]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.chaos.campaign import Plan, campaign, write
from tests.chaos.fleet import fleet
from tests.chaos.results import Results
from tests.property.reference import Reference
from tests.property.talker import make_talker

ROUND_SECONDS = 240.0
QUIET_SECONDS = 30.0
"""About what lies between two rounds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--rounds", type=int, help="into which the time is divided; default: of some 4 minutes")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--report", type=Path, default=Path("build/chaos.md"))
    parser.add_argument("--sentinel", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--keep-logs", type=Path, metavar="FOLDER", help="where the logs of all processes go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = args.minutes * 60
    rounds = args.rounds or max(1, round(seconds / (ROUND_SECONDS + QUIET_SECONDS)))
    plan = Plan(args.seed, seconds=max(30.0, seconds / rounds - QUIET_SECONDS), rounds=rounds, clients=args.clients)
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    results = Results(
        f"Chaos, {day}: {rounds} rounds of {plan.seconds:.0f} s, {plan.clients} clients, seed {plan.seed}"
    )
    with tempfile.TemporaryDirectory(prefix="backhaul-chaos-") as name:
        try:
            asyncio.run(_run(Path(name), plan, results, sentinel=args.sentinel))
        finally:
            write(results, args.report)
            if args.keep_logs is not None:
                args.keep_logs.mkdir(parents=True, exist_ok=True)
                for log in Path(name).glob("*.log"):
                    shutil.copy(log, args.keep_logs)
    print(results.text(), f"\nreport: {args.report}", sep="\n")
    return 0 if results.passed else 1


async def _run(folder: Path, plan: Plan, results: Results, *, sentinel: bool) -> None:
    model = make_talker(folder / "talker")
    reference = Reference(model)
    async with fleet(model, folder, sentinel=sentinel) as started:
        await campaign(started, reference, plan, results)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""What the whole stack costs when nobody talks to it: processor time of every process, as a share of one core.

    python -m bench.idle [--seconds 20]

Goal: below 3 % of one core for store, router, one prefill and one decode engine together.
"""

from __future__ import annotations

import argparse
import time

import psutil

from bench.stack import provenance, running_stack

GOAL = 0.03


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="GGUF file or HF folder; default: the small model")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with running_stack(*(["--model", args.model] if args.model else [])) as facts:
        parts = {"router": facts["router"]["pid"], "store": facts["store"]["pid"]}
        parts |= {f"{engine['role']} {i}": engine["pid"] for i, engine in enumerate(facts["engines"])}
        time.sleep(3)
        started, before = time.perf_counter(), {name: cpu_seconds(pid) for name, pid in parts.items()}
        time.sleep(args.seconds)
        elapsed = time.perf_counter() - started
        shares = {name: (cpu_seconds(pid) - before[name]) / elapsed for name, pid in parts.items()}
    print(f"Idle cost over {elapsed:.0f} s, share of one core")
    print(provenance())
    for name, share in shares.items():
        print(f"{name:>10} {share:7.2%}")
    total = sum(shares.values())
    print(f"{'all':>10} {total:7.2%}   goal below {GOAL:.0%}: {'met' if total < GOAL else 'missed'}")


if __name__ == "__main__":
    main()

"""How fast a decode engine pulls KV: random blocks between two processes, beside a plain memcpy of the same blocks.

    python -m bench.transfer [--megabytes 100] [--repeat 7] [--tls tcp,self]

A pull is timed from the request to its PullDone event, with the handshake done and the HTTP claim included. Every pull
is followed by a copy of as many random blocks within this process, so that both see the machine in the same state; the
ratio is that of the medians. `--tls` sets UCX_TLS: `tcp,self` is what two hosts without RDMA have.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import closing

import numpy as np

from bench.stack import provenance
from connectors.transport import PullDone
from tests.integration.kv_engine import KVEngine, Options, OwnerProcess

BLOCKS = {
    12_288: "one layer of a block of SmolLM2-135M",
    98_304: "",
    368_640: "a block of SmolLM2-135M, bfloat16",
    737_280: "a block of SmolLM2-135M, float32",
    2_097_152: "a block of an 8B model, bfloat16",
}
LATENCY_BLOCKS = 60


def measure(block_bytes: int, total_bytes: int, repeat: int, tls: str | None) -> tuple[float, float, float]:
    """(GB/s of pulls, GB/s of memcpy, milliseconds of a pull of LATENCY_BLOCKS blocks), medians."""
    count = max(1, total_bytes // block_bytes)
    num_blocks = 2 * max(count, LATENCY_BLOCKS)
    owner = OwnerProcess(Options(num_blocks=num_blocks, block_bytes=block_bytes, ucx_tls=tls))
    try:
        reader = KVEngine(Options(num_blocks=num_blocks, block_bytes=block_bytes, ucx_tls=tls, transfer_timeout=60.0))
        with closing(reader):
            reader.arena[:] = 1
            source = np.ones_like(reader.arena)
            chooser, blocks = random.Random(0), range(num_blocks)
            pulls, copies, short = [], [], []
            for n in range(repeat + 1):
                local, remote = chooser.sample(blocks, count), chooser.sample(blocks, count)
                pulls.append(pull_seconds(owner, reader, f"long-{n}", local, remote))
                started = time.perf_counter()
                for here, there in zip(local, remote, strict=True):
                    reader.arena[here] = source[there]
                copies.append(time.perf_counter() - started)
                local, remote = chooser.sample(blocks, LATENCY_BLOCKS), chooser.sample(blocks, LATENCY_BLOCKS)
                short.append(pull_seconds(owner, reader, f"short-{n}", local, remote))
    finally:
        owner.kill()
    # The first of each warms up: connection, pages.
    pull, copy, latency = (statistics.median(seconds[1:]) for seconds in (pulls, copies, short))
    return count * block_bytes / pull / 1e9, count * block_bytes / copy / 1e9, latency * 1e3


def pull_seconds(owner: OwnerProcess, reader: KVEngine, name: str, local: list[int], remote: list[int]) -> float:
    owner.hold(name, remote)
    reader.pull(owner.peer, name, local, remote)
    event = reader.event(120.0)
    assert isinstance(event, PullDone), event
    return event.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=100, help="size of one pull")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tls", default=None, help="UCX_TLS, for instance tcp,self; default: what UCX chooses")
    arguments = parser.parse_args()
    print(f"pulls of {arguments.megabytes} MB in random blocks, UCX_TLS={arguments.tls or 'default'} · {provenance()}")
    print(f"{'block bytes':>12} {'pull GB/s':>10} {'memcpy GB/s':>12} {'ratio':>6} {f'{LATENCY_BLOCKS} blocks ms':>13}")
    for block_bytes, remark in BLOCKS.items():
        pull, copy, latency = measure(block_bytes, arguments.megabytes * 1_000_000, arguments.repeat, arguments.tls)
        print(
            f"{block_bytes:>12,} {pull:>10.2f} {copy:>12.2f} {pull / copy:>6.2f} {latency:>13.1f}   {remark}".rstrip()
        )


if __name__ == "__main__":
    main()

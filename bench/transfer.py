"""How fast decode engines pull KV from a prefill engine: random blocks between processes, beside memcpy of as many.

    python -m bench.transfer [--tokens 1000] [--readers 1,2,4,8] [--repeat 7] [--tls default tcp,self]
                             [--block-bytes 737280]

One owner; each reader is a process with an agent of its own. In a round every reader pulls its blocks, all at once,
then all copy as many bytes, block by block, within their own memory, then all send as many over a plain TCP connection
of their own, so that the three see the machine in the same state. A pull is timed from the request to its event, with
the HTTP claim included and the handshake not; several readers from the first one's start to the last one's end. `--tls`
sets UCX_TLS: by default UCX reads another process's memory directly (CMA), `tcp,self` is what hosts without RDMA have.
Figures are medians of the rounds, ratios those of each round. Goal: at least 0.65 of memcpy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.stack import provenance
from connectors.transport import Peer, PullDone
from tests.integration.kv_engine import KVEngine, Options, OwnerProcess

BLOCK_TOKENS = 16
BLOCK_BYTES = 737_280
"""Of SmolLM2-135M in float32."""
GOAL = 0.65
DEFAULT = "default"


class Reader:
    """In a process of its own: pulls, copies and sends when told to. Every task answers (start, end) on the clock that
    all processes share."""

    def __init__(self, options: Options) -> None:
        self._engine = KVEngine(options)
        self._engine.arena[:] = 1
        self._source = np.ones_like(self._engine.arena)
        self._sink = np.empty_like(self._engine.arena[0])
        listener = socket.create_server(("127.0.0.1", 0))
        self._sender = socket.create_connection(listener.getsockname())
        self._receiver = listener.accept()[0]
        listener.close()

    def pull(self, peer: Peer, name: str, local: Sequence[int], remote: Sequence[int]) -> tuple[float, float]:
        started = time.monotonic()
        self._engine.pull(peer, name, local, remote)
        event = self._engine.event(120.0)
        ended = time.monotonic()
        assert isinstance(event, PullDone), event
        return started, ended

    def copy(self, local: Sequence[int], remote: Sequence[int]) -> tuple[float, float]:
        started = time.monotonic()
        for here, there in zip(local, remote, strict=True):
            self._engine.arena[here] = self._source[there]
        return started, time.monotonic()

    def send(self, count: int) -> tuple[float, float]:
        """Through the kernel's loopback, block by block into the same memory."""

        def run() -> None:
            for block in self._source[:count]:
                self._sender.sendall(block)

        sender = threading.Thread(target=run)
        view = memoryview(self._sink)
        started = time.monotonic()
        sender.start()
        for _ in range(count):
            received = 0
            while received < len(view):
                received += self._receiver.recv_into(view[received:])
        sender.join()
        return started, time.monotonic()


def _read(options: Options, connection: Connection) -> None:
    reader = Reader(options)
    tasks: dict[str, Callable[..., tuple[float, float]]] = {
        "pull": reader.pull,
        "copy": reader.copy,
        "send": reader.send,
    }
    connection.send("ready")
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        connection.send(tasks[name](*arguments))


class Readers:
    """Reader processes that do the same thing at once."""

    def __init__(self, count: int, options: Options) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.integration.kv_engine"])
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            connection, child = context.Pipe()
            process = context.Process(target=_read, args=(options, child), daemon=True)
            process.start()
            child.close()
            self._connections.append(connection)
            self._processes.append(process)
        for connection in self._connections:
            connection.recv()

    def all(self, task: Callable[[int], tuple[object, ...]]) -> float:
        """Seconds from the first one's start to the last one's end."""
        commands = [task(index) for index in range(len(self._connections))]
        for connection, command in zip(self._connections, commands, strict=True):
            connection.send(command)
        spans = [connection.recv() for connection in self._connections]
        return float(max(end for _, end in spans) - min(start for start, _ in spans))

    def kill(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join(10)
            connection.close()


@dataclass
class Result:
    """Seconds of each round."""

    pulls: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    sends: list[float] = field(default_factory=list)


def measure(options: Options, count: int, readers: int, repeat: int) -> Result:
    owner = OwnerProcess(options)
    others = None
    try:
        peer = owner.peer
        others = Readers(readers, options)
        chooser, blocks = random.Random(0), range(options.num_blocks)

        def pull(index: int) -> tuple[object, ...]:
            name = f"{round}-{index}"
            local, remote = chooser.sample(blocks, count), chooser.sample(blocks, count)
            owner.hold(name, remote)
            return ("pull", peer, name, local, remote)

        def copy(index: int) -> tuple[object, ...]:
            return ("copy", chooser.sample(blocks, count), chooser.sample(blocks, count))

        result = Result()
        for round in range(repeat + 1):
            spent = (others.all(pull), others.all(copy), others.all(lambda index: ("send", count)))
            if round:  # the first one connects, and touches the pages
                for found, seconds in zip((result.pulls, result.copies, result.sends), spent, strict=True):
                    found.append(seconds)
        return result
    finally:
        owner.kill()
        if others is not None:
            others.kill()


def row(tls: str, readers: int, total_bytes: int, result: Result) -> tuple[str, float]:
    """A line of the table, and the pulls' share of memcpy."""

    def rate(seconds: list[float]) -> str:
        return f"{total_bytes / statistics.median(seconds) / 1e9:.2f}"

    def ratio(base: list[float]) -> float:
        return statistics.median(other / pull for pull, other in zip(result.pulls, base, strict=True))

    share = ratio(result.copies)
    cells = (
        *(tls, str(readers), f"{statistics.median(result.pulls) * 1e3:.1f}", rate(result.pulls)),
        *(rate(result.copies), f"{share:.2f}", rate(result.sends), f"{ratio(result.sends):.2f}"),
    )
    return f"| {' | '.join(cells)} |", share


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure pulls of KV beside memcpy.")
    parser.add_argument("--tokens", type=int, default=1000, help="whose KV one pull moves")
    parser.add_argument("--readers", default="1,2,4,8", help="how many pull at once, separated by commas")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tls", nargs="+", default=[DEFAULT, "tcp,self"], help="values of UCX_TLS")
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES, help=f"of {BLOCK_TOKENS} tokens")
    arguments = parser.parse_args()
    count = -(-arguments.tokens // BLOCK_TOKENS)
    one = count * arguments.block_bytes
    print(f"{provenance()} · {arguments.repeat} rounds, medians")
    print(f"each reader {arguments.tokens} tokens: {count} random blocks of {arguments.block_bytes:,} bytes\n")
    print("| UCX_TLS | readers | pull, ms | pull GB/s | memcpy GB/s | of memcpy | loopback TCP GB/s | of that |")
    print("| --- |" + " ---: |" * 7)
    shares: dict[str, list[float]] = {}
    for tls in arguments.tls:
        options = Options(
            num_blocks=2 * count,
            block_bytes=arguments.block_bytes,
            ucx_tls=None if tls == DEFAULT else tls,
            transfer_timeout=60.0,
            handshake_timeout=10.0,
        )
        for readers in map(int, arguments.readers.split(",")):
            line, share = row(tls, readers, readers * one, measure(options, count, readers, arguments.repeat))
            shares.setdefault(tls, []).append(share)
            print(line, flush=True)
    print()
    for tls, found in shares.items():
        print(f"goal at least {GOAL} of memcpy, {tls}: {'met' if min(found) >= GOAL else 'missed'}")


if __name__ == "__main__":
    main()

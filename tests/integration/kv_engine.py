"""The KV side of an engine without the engine: an arena, leases, a NixlTransport and the /kv routes over real HTTP.

Runs in the test's process as the reader, or by `OwnerProcess` in one of its own, where it can be killed and stopped.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import psutil

os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
import nixl_cu12._api  # noqa: F401 - here, so that the fork server has it and owners start at once

from connectors.lease import ClaimRefused, Leases
from connectors.nixl import NixlTransport
from connectors.transport import LeaseReleased, Peer, Pull, TransferEvent

LAYOUT = "test-layout"
PATIENCE = 20.0
RECYCLED = 255
"""The content of blocks that were given to others."""


@dataclass
class Options:
    """What an engine is and how it misbehaves."""

    num_blocks: int = 64
    block_bytes: int = 65536
    seed: int | None = None
    """Of the arena's content; None leaves it zeroed."""
    port: int = 0
    kv_layout: str = LAYOUT
    claim_seconds: float = 30.0
    transfer_timeout: float = 10.0
    handshake_timeout: float = 1.0
    ucx_tls: str | None = None


def pattern(seed: int, block_id: int, block_bytes: int) -> np.ndarray[Any, Any]:
    return ((np.arange(block_bytes) * 7 + block_id * 13 + seed) % 251).astype(np.uint8)


def names_of(block_ids: Sequence[int]) -> list[str]:
    """Stand-ins for content hashes; a block has one name wherever it lies."""
    return [f"{block_id:032x}" for block_id in block_ids]


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


class KVEngine:
    def __init__(self, options: Options) -> None:
        if options.ucx_tls is not None:
            os.environ["UCX_TLS"] = options.ucx_tls
        self.options = options
        self.engine_id = str(uuid.uuid4())
        self.arena = np.zeros((options.num_blocks, options.block_bytes), np.uint8)
        self.fill(range(options.num_blocks))
        self.leases = Leases(claim_seconds=options.claim_seconds, on_claim=lambda: self.transport.wake())
        self.events: SimpleQueue[TransferEvent] = SimpleQueue()
        self.released: list[str] = []
        self.num_renewed = 0
        self.num_claims = 0
        self.transport = NixlTransport(
            engine_id=self.engine_id,
            kv_layout=options.kv_layout,
            base_address=self.arena.ctypes.data,
            num_blocks=options.num_blocks,
            block_bytes=options.block_bytes,
            emit=self._emit,
            claims_open=lambda: self.leases.num_claimed > 0,
            transfer_timeout=options.transfer_timeout,
            handshake_timeout=options.handshake_timeout,
        )
        self.server = ThreadingHTTPServer(("127.0.0.1", options.port), _handler(self))
        self.server.daemon_threads = True
        self.peer = Peer(self.engine_id, "127.0.0.1", self.server.server_port)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True, name="http").start()

    def _emit(self, event: TransferEvent) -> None:
        if isinstance(event, LeaseReleased):
            self.leases.release(event.request_id)
            self.released.append(event.request_id)
        else:
            self.events.put(event)

    def hold(self, request_id: str, block_ids: Sequence[int], duration: float = 60.0, revocable: bool = False) -> None:
        self.leases.hold(request_id, block_ids, names_of(block_ids), duration, revocable=revocable)

    def fill(self, block_ids: Iterable[int]) -> None:
        """Give blocks the content that is told by the seed, if there is one."""
        if self.options.seed is not None:
            for block_id in block_ids:
                self.arena[block_id] = pattern(self.options.seed, block_id, self.options.block_bytes)

    def revoke(self) -> str | None:
        """Revoke the oldest lease and use its blocks for something else."""
        ended = self.leases.revoke_oldest()
        if ended is None:
            return None
        self.arena[list(ended.block_ids)] = RECYCLED
        return ended.request_id

    def pull(
        self,
        peer: Peer,
        request_id: str,
        local: Sequence[int],
        remote: Sequence[int],
        *,
        layout: str | None = LAYOUT,
        first_block: int = 0,
        block_hashes: Sequence[str] | None = None,
    ) -> None:
        hashes = names_of(remote) if block_hashes is None else block_hashes
        self.transport.pull(
            Pull(request_id, peer, request_id, tuple(local), tuple(remote), first_block, tuple(hashes), layout)
        )

    def event(self, seconds: float = PATIENCE) -> TransferEvent:
        try:
            return self.events.get(timeout=seconds)
        except Empty:
            raise AssertionError(f"no event within {seconds} s") from None

    def no_event(self, seconds: float) -> None:
        try:
            event = self.events.get(timeout=seconds)
        except Empty:
            return
        raise AssertionError(f"unexpected {event}")

    def holds(self, seed: int, local: Sequence[int], remote: Sequence[int]) -> bool:
        """Whether local blocks have the content of remote ones of an owner with this seed."""
        size = self.options.block_bytes
        return all(
            bool((self.arena[here] == pattern(seed, there, size)).all())
            for here, there in zip(local, remote, strict=True)
        )

    def close(self) -> None:
        self.transport.close()
        self.server.shutdown()
        self.server.server_close()


def _handler(engine: KVEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # One segment per answer: Nagle and delayed acknowledgements would cost 40 ms each.
        wbufsize = -1

        def do_GET(self) -> None:
            self.answer(200, engine.transport.agent_info())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["engine_id"] != engine.engine_id:
                self.answer(409, {"error": {"message": "restarted", "code": "engine_mismatch"}})
            elif self.path == "/kv/claim":
                self.claim(body["request_id"])
            elif self.path == "/kv/renew":
                renewed = engine.leases.renew(body["request_ids"])
                engine.num_renewed += renewed
                self.answer(200, {"renewed": renewed})
            elif self.path == "/kv/release":
                released = engine.leases.cancel(body["request_id"], body.get("claim_id"))
                if released:
                    engine._emit(LeaseReleased(body["request_id"]))
                self.answer(200, {"released": released})

        def claim(self, request_id: str) -> None:
            engine.num_claims += 1
            claim = engine.leases.claim(request_id)
            if isinstance(claim, ClaimRefused):
                self.answer(410, {"error": {"message": claim.reason, "code": "lease_expired"}})
                return
            self.answer(200, asdict(claim))

        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@dataclass
class State:
    """What an owner has seen so far."""

    released: list[str] = field(default_factory=list)
    num_claims: int = 0
    num_renewed: int = 0
    num_leases: int = 0
    num_claimed: int = 0
    num_bad_notifications: int = 0


class OwnerProcess:
    """A KVEngine in a process of its own; leaving the `with` block kills it."""

    def __init__(self, options: Options) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(options, child), daemon=True)
        self.process.start()
        child.close()
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer:
        if self._peer is None:
            assert self._connection.poll(60), "the owner did not start"
            self._peer = self._connection.recv()
        return self._peer

    def hold(self, request_id: str, block_ids: Sequence[int], duration: float = 60.0, revocable: bool = False) -> None:
        self._ask("hold", request_id, tuple(block_ids), duration, revocable)

    def fill(self, block_ids: Sequence[int]) -> None:
        self._ask("fill", tuple(block_ids))

    def revoke(self) -> str | None:
        name: str | None = self._ask("revoke")
        return name

    def pull(self, peer: Peer, request_id: str, local: Sequence[int], remote: Sequence[int]) -> None:
        self._ask("pull", peer, request_id, tuple(local), tuple(remote))

    def event(self) -> TransferEvent:
        event: TransferEvent = self._ask("event")
        return event

    def holds(self, seed: int, local: Sequence[int], remote: Sequence[int]) -> bool:
        return bool(self._ask("holds", seed, tuple(local), tuple(remote)))

    def state(self) -> State:
        state: State = self._ask("state")
        return state

    def __enter__(self) -> OwnerProcess:
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()

    def stop(self) -> None:
        """Returns once the process hangs."""
        process = psutil.Process(self.process.pid)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

    def resume(self) -> None:
        psutil.Process(self.process.pid).resume()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._connection.close()

    def _ask(self, *command: object) -> Any:
        assert self.peer is not None
        self._connection.send(command)
        assert self._connection.poll(PATIENCE + 5), f"no answer to {command[0]}"
        return self._connection.recv()


class ClaimGate:
    """Stands before an owner's HTTP server and, while `closing`, stops the owner's process between its answer to a
    claim and the reader's receipt of it: the read then meets an owner that hangs."""

    def __init__(self, owner: OwnerProcess) -> None:
        self._owner = owner
        self.closing = True
        self._claimed = False
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(owner.peer.engine_id, "127.0.0.1", self._server.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> ClaimGate:
        return self

    def __exit__(self, *args: object) -> None:
        """Nothing of it is left: tests count descriptors and threads."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(5)  # or a connection that it is just taking would be overlooked
        self._server.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                reader = self._server.accept()[0]
            except OSError:
                return
            self._connections.append(reader)
            try:
                owner = socket.create_connection((self._owner.peer.host, self._owner.peer.port))
            except OSError:  # it was killed
                with contextlib.suppress(OSError):  # and the test may be over
                    reader.shutdown(socket.SHUT_RDWR)
                continue
            self._connections.append(owner)
            for target, pair in ((self._requests, (reader, owner)), (self._answers, (owner, reader))):
                self._threads.append(threading.Thread(target=target, args=pair, daemon=True))
                self._threads[-1].start()

    def _requests(self, reader: socket.socket, owner: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for data in _pieces(reader):
                self._claimed = self._claimed or b"POST /kv/claim" in data
                owner.sendall(data)
            owner.shutdown(socket.SHUT_RDWR)

    def _answers(self, owner: socket.socket, reader: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for data in _pieces(owner):
                if self._claimed and self.closing:
                    self._owner.stop()
                self._claimed = False
                reader.sendall(data)
            reader.shutdown(socket.SHUT_RDWR)


def _pieces(connection: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while data := connection.recv(65536):
            yield data


def _serve(options: Options, connection: Connection) -> None:
    engine = KVEngine(options)
    connection.send(engine.peer)

    def state() -> State:
        return State(
            list(engine.released),
            engine.num_claims,
            engine.num_renewed,
            len(engine.leases),
            engine.leases.num_claimed,
            engine.transport.num_bad_notifications,
        )

    commands: dict[str, Callable[..., object]] = {
        "hold": engine.hold,
        "fill": engine.fill,
        "revoke": engine.revoke,
        "pull": engine.pull,
        "event": engine.event,
        "holds": engine.holds,
        "state": state,
    }
    while True:
        try:
            name, *args = connection.recv()
        except EOFError:
            return
        connection.send(commands[name](*args))

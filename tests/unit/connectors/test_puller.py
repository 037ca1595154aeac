"""The puller's decisions, over a NIXL agent whose every answer is scripted; the peer's HTTP server is real."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from connectors import puller as puller_module
from connectors.agent import AgentError, PeerLost
from connectors.peer import AgentInfo
from connectors.puller import MAX_PEERS, Puller
from connectors.transport import Peer, Pull, PullDone, PullFailed, PullStalled

ME = AgentInfo(
    version=1,
    engine_id="me",
    agent_name="my-agent",
    agent_metadata=b"x",
    base_address=1,
    num_blocks=8,
    block_bytes=100,
    kv_layout="layout",
    memory="DRAM",
    device_id=0,
)
OWNER = ME.model_copy(update={"engine_id": "owner", "agent_name": "owners-agent"})

HASHES = [f"{block:032x}" for block in range(8)]
UNCLAIM = {"engine_id": "owner", "request_id": "owners-r", "claim_id": "the-claim"}


class FakeRead:
    def __init__(self) -> None:
        self.state: bool | Exception = False
        self.released = False

    def done(self) -> bool:
        assert not self.released, "asked about a released read"
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def release(self) -> None:
        assert self.state is True or isinstance(self.state, PeerLost), "released while under way"
        self.released = True


class FakeAgent:
    """Also the only remote it connects to."""

    def __init__(self) -> None:
        self.reads: list[FakeRead] = []
        self.num_links = 0
        self.refuses: Exception | None = None
        self.before_read: Callable[[], None] = lambda: None

    def connect(self, info: AgentInfo) -> FakeAgent:
        self.num_links += 1
        return self

    def read(self, local_ids: Sequence[int], remote_ids: Sequence[int], notification: bytes) -> FakeRead:
        self.before_read()
        if self.refuses:
            raise self.refuses
        self.reads.append(FakeRead())
        return self.reads[-1]

    def disconnect(self) -> None:
        assert all(read.released for read in self.reads), "disconnected with reads under way"
        self.num_links -= 1


class Bench:
    def __init__(self) -> None:
        self.claim: dict[str, Any] = {
            "valid_for": 30.0,
            "block_ids": list(range(8)),
            "block_hashes": HASHES,
            "claim_id": "the-claim",
        }
        self.released: list[dict[str, str]] = []
        self.claimed: Callable[[], None] = lambda: None
        """What happens before a claim is answered."""
        self.agent = FakeAgent()
        self.events: list[Any] = []
        self.actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.peer = Peer("owner", "127.0.0.1", self.server.server_port)
        self.puller = Puller(
            self.agent,
            me=ME,
            emit=self.events.append,
            post=self.actions.put,
            transfer_timeout=5.0,
            handshake_timeout=2.0,
        )

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bench = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_GET(self) -> None:
                self.answer(OWNER.to_json())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/kv/claim":
                    bench.claimed()
                    self.answer(bench.claim)
                else:
                    bench.released.append(body)
                    self.answer({"released": True})

            def answer(self, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        return Handler

    def pull(self, name: str = "r", blocks: Sequence[int] = (0, 1), peer: Peer | None = None, **changes: Any) -> None:
        pull = Pull(
            request_id=name,
            peer=peer or self.peer,
            remote_request_id=f"owners-{name}",
            local_block_ids=tuple(range(len(blocks))),
            remote_block_ids=tuple(blocks),
            first_block=blocks[0],
            block_hashes=tuple(HASHES[block] for block in blocks),
            kv_layout="layout",
        )
        self.puller.pull(replace(pull, **changes))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            self.step()

    def step(self) -> None:
        try:
            action = self.actions.get(timeout=0.01)
        except Empty:
            pass
        else:
            action()
        self.puller.poll()

    def reading(self, name: str = "r") -> FakeRead:
        """Pull until the read is posted."""
        num_reads = len(self.agent.reads)
        self.pull(name)
        self.until(lambda: len(self.agent.reads) > num_reads)
        return self.agent.reads[-1]

    def close(self) -> None:
        for lane in self.puller.close():
            lane.join(5)
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def skip(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the puller's clock, and the HTTP deadlines with it, jump ahead."""
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)


def test_a_pull_ends_done(bench: Bench) -> None:
    read = bench.reading()
    assert bench.puller.reading
    read.state = True
    bench.until(lambda: bool(bench.events))
    (event,) = bench.events
    assert isinstance(event, PullDone)
    assert event.num_bytes == 200
    assert read.released
    assert bench.puller.num_pulls == 0


def test_what_was_read_after_the_claim_ran_out_is_thrown_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.claim["valid_for"] = 4.0
    read = bench.reading()
    read.state = True
    skip(monkeypatch, 4.5)
    bench.until(lambda: bool(bench.events))
    assert [(event.request_id, event.reason) for event in bench.events] == [("r", "expired")]


def test_a_claim_that_ran_out_before_the_read_is_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.claim["valid_for"] = 1e-6
    bench.pull()
    bench.until(lambda: bool(bench.events))
    assert bench.events[0].reason == "expired"
    bench.until(lambda: bench.released == [UNCLAIM])
    assert not bench.agent.reads


@pytest.mark.parametrize(
    ("remote", "first", "hashed"),
    [
        ((1, 0), 0, (0, 1)),
        ((1, 0), 0, (1, 0)),
        ((0, 0), 0, (0, 0)),
        ((0, 0), 0, (0, 1)),
        ((0, 1), 0, (0, 2)),
        ((0, 1), 0, ()),
        ((0, 1), 1, (0, 1)),
        ((0, 1), 1, (1, 2)),
        ((7, 8), 7, (7, 7)),
        ((8, 9), 8, ()),
    ],
)
def test_a_lease_that_does_not_hold_what_is_wanted_is_given_back_unread(
    bench: Bench, remote: tuple[int, ...], first: int, hashed: tuple[int, ...]
) -> None:
    hashes = tuple(HASHES[block] for block in hashed)
    bench.pull(remote_block_ids=remote, first_block=first, block_hashes=hashes)
    bench.until(lambda: bool(bench.events))
    assert [event.reason for event in bench.events] == ["hashes"]
    bench.until(lambda: bench.released == [UNCLAIM])
    assert not bench.agent.reads
    assert bench.reading("next"), "the peer is not held to be broken"


def test_blocks_beyond_the_peers_memory_are_not_read_whatever_it_says(bench: Bench) -> None:
    bench.claim["block_ids"] = [100, 101]
    bench.pull(blocks=(0, 1), remote_block_ids=(100, 101))
    bench.until(lambda: bool(bench.events))
    assert [event.reason for event in bench.events] == ["claim"]
    bench.until(lambda: bench.released == [UNCLAIM])


def test_a_claim_granted_too_late_is_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()
    bench.claimed = lambda: (asked.set(), answer.wait(5), None)[-1]
    bench.pull()
    bench.until(asked.is_set)
    with monkeypatch.context() as patch:
        now = time.monotonic
        patch.setattr(puller_module, "EXCHANGE_SLACK", 0.0)
        patch.setattr(time, "monotonic", lambda: now() + 3.5)
        bench.puller.poll()
    assert [event.reason for event in bench.events] == ["claim"]
    answer.set()
    bench.until(lambda: bench.released == [UNCLAIM])
    assert not bench.agent.reads


def test_a_claim_granted_while_closing_is_given_back(bench: Bench) -> None:
    asked, answer = threading.Event(), threading.Event()
    bench.claimed = lambda: (asked.set(), answer.wait(5), None)[-1]
    bench.pull()
    bench.until(asked.is_set)
    lanes = bench.puller.close()
    answer.set()
    for lane in lanes:
        lane.join(5)
    assert [event.reason for event in bench.events] == ["transfer"]
    assert bench.released == [UNCLAIM]


def test_a_stalled_read_is_not_released_before_it_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    read = bench.reading()
    skip(monkeypatch, 5.5)
    bench.step()
    assert [type(event) for event in bench.events] == [PullStalled]
    assert not bench.puller.reading, "a hung peer must not keep the transfer thread busy"
    bench.step()
    assert not read.released
    read.state = True
    bench.step()
    assert [type(event) for event in bench.events] == [PullStalled, PullFailed]
    assert bench.events[1].reason == "timeout"
    assert read.released


def test_a_lost_peer_fails_its_pulls_and_is_disconnected_after_the_last(bench: Bench) -> None:
    first = bench.reading("first")
    second = bench.reading("second")
    first.state = PeerLost("gone")
    bench.step()
    assert [(event.request_id, event.reason) for event in bench.events] == [("first", "disconnected")]
    assert bench.agent.num_links == 1
    second.state = PeerLost("gone")
    bench.step()
    assert bench.events[1].reason == "disconnected"
    assert bench.agent.num_links == 0


def test_a_read_that_nixl_lost_track_of_keeps_its_blocks(bench: Bench) -> None:
    read = bench.reading()
    read.state = AgentError("backend")
    for _ in range(3):
        bench.step()
    assert [type(event) for event in bench.events] == [PullStalled]
    assert not read.released
    bench.puller.close()
    bench.puller.fail_all()
    assert [type(event) for event in bench.events] == [PullStalled, PullFailed]


@pytest.mark.parametrize(("error", "reason"), [(AgentError("no"), "transfer"), (PeerLost("no"), "disconnected")])
def test_a_refused_read_fails_the_pull(bench: Bench, error: Exception, reason: str) -> None:
    bench.agent.refuses = error
    bench.pull()
    bench.until(lambda: bool(bench.events))
    assert bench.events[0].reason == reason
    bench.until(lambda: bench.released == [UNCLAIM])
    bench.pull("next")
    assert bench.events[1].reason == reason
    assert "next try in 1 s" in bench.events[1].detail


def test_back_off_doubles_up_to_a_minute_and_ends_with_a_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, offset, now = [], 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + offset)
    bench.agent.refuses = AgentError("no")
    for _ in range(8):
        num_events = len(bench.events)
        bench.pull()
        bench.until(lambda count=num_events: len(bench.events) > count)
        (peer,) = bench.puller._peers.values()
        waits.append(round(peer.retry_at - time.monotonic()))
        offset += waits[-1] + 0.1
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    bench.agent.refuses = None
    bench.reading().state = True
    bench.step()
    bench.agent.refuses = AgentError("no")
    bench.pull()
    bench.until(lambda: peer.retry_at > time.monotonic())
    assert round(peer.retry_at - time.monotonic()) == 1


def test_idle_peers_are_forgotten_but_not_in_the_middle_of_a_pull(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller_module, "PEER_IDLE_SECONDS", -1.0)
    read = bench.reading()
    bench.puller.forget_idle()
    assert bench.puller.num_peers == 1
    read.state = True
    bench.step()
    bench.puller.forget_idle()
    bench.step()
    assert (bench.puller.num_peers, bench.agent.num_links) == (0, 0)


def invented(number: int, bench: Bench) -> Peer:
    return Peer(f"invented-{number}", bench.peer.host, bench.peer.port)


def test_invented_peers_cost_a_bounded_number_of_threads_and_no_real_peer(bench: Bench) -> None:
    bench.reading().state = True
    bench.until(lambda: bool(bench.events))
    for number in range(3 * MAX_PEERS):
        bench.pull(f"forged-{number}", peer=invented(number, bench))
        bench.until(lambda count=number + 2: len(bench.events) == count)
        assert bench.events[-1].reason == "engine_id"
        assert bench.puller.num_peers <= MAX_PEERS
    assert sum(thread.name.startswith("peer-") for thread in threading.enumerate()) <= MAX_PEERS + 1
    num_links = bench.agent.num_links
    bench.reading("again")
    assert bench.agent.num_links == num_links == 1, "the link was kept"


def test_when_all_peers_are_busy_others_wait_for_nothing(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for number in range(MAX_PEERS):
            bench.puller.release(Peer(f"hangs-{number}", "127.0.0.1", port), "x")
        bench.pull()
        assert [event.reason for event in bench.events] == ["handshake"]
        bench.puller.renew(bench.peer, ["x"])
        bench.puller.release(bench.peer, "x")
        assert bench.puller.num_messages_dropped == 2
        assert bench.puller.num_peers == MAX_PEERS
        # They do not hang for ever.
        bench.until(lambda: any(peer.lane.idle for peer in bench.puller._peers.values()))
        bench.reading()


def test_nothing_starts_after_close(bench: Bench) -> None:
    for lane in bench.puller.close():
        lane.join(5)
    bench.pull()
    bench.puller.release(bench.peer, "x")
    assert [event.reason for event in bench.events] == ["transfer"]
    assert bench.puller.num_peers == 0

"""NixlTransport between real processes: pulls, and every way in which the other side fails to play along."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import psutil
import pytest

from connectors import nixl
from connectors.nixl import NixlTransport, TransportError
from connectors.transport import Peer, PullDone, PullFailed, PullStalled
from tests.integration.kv_engine import LAYOUT, ClaimGate, KVEngine, Options, OwnerProcess, names_of, wait_until
from tests.valkey import free_port

SEED = 5
TRANSPORTS = pytest.mark.parametrize("tls", [None, "tcp,self"], ids=["default", "tcp"])


@pytest.fixture(autouse=True)
def ucx_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVEngine sets UCX_TLS for the whole process."""
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.fixture(scope="module")
def owners() -> Iterator[dict[str | None, OwnerProcess]]:
    """One well-behaved owner per UCX transport; tests use request ids of their own."""
    processes = {tls: OwnerProcess(Options(seed=SEED, ucx_tls=tls)) for tls in (None, "tcp,self")}
    yield processes
    for process in processes.values():
        process.kill()


@pytest.fixture
def owner(owners: dict[str | None, OwnerProcess]) -> OwnerProcess:
    return owners[None]


@pytest.fixture
def reader() -> Iterator[KVEngine]:
    engine = KVEngine(Options())
    yield engine
    engine.close()


def done(event: object) -> PullDone:
    assert isinstance(event, PullDone), event
    return event


def failed(event: object, reason: str) -> PullFailed:
    assert isinstance(event, PullFailed), event
    assert event.reason == reason, event
    return event


@TRANSPORTS
def test_random_blocks_arrive_and_each_lease_is_released_once(
    owners: dict[str | None, OwnerProcess], tls: str | None
) -> None:
    owner, reader, rng = owners[tls], KVEngine(Options(ucx_tls=tls)), random.Random(1)
    with closing(reader):
        names = [f"random-{tls}-{n}" for n in range(20)]
        for name in names:
            remote, local = rng.sample(range(64), 30), rng.sample(range(64), 30)
            owner.hold(name, remote)
            reader.pull(owner.peer, name, local, remote)
            event = done(reader.event())
            assert (event.request_id, event.num_bytes) == (name, 30 * 65536)
            assert reader.holds(SEED, local, remote)
        wait_until(lambda: set(names) <= set(owner.state().released))
        assert sorted(n for n in owner.state().released if n in names) == sorted(names)
        assert owner.state().num_bad_notifications == 0


@TRANSPORTS
def test_many_pulls_at_once(owners: dict[str | None, OwnerProcess], tls: str | None) -> None:
    owner, reader, rng = owners[tls], KVEngine(Options(ucx_tls=tls)), random.Random(2)
    with closing(reader):
        local = rng.sample(range(64), 64)
        pulls = {f"many-{tls}-{n}": (local[4 * n : 4 * n + 4], rng.sample(range(64), 4)) for n in range(16)}
        for name, (_, remote) in pulls.items():
            owner.hold(name, remote)
        for name, (here, there) in pulls.items():
            reader.pull(owner.peer, name, here, there)
        assert {done(reader.event()).request_id for _ in pulls} == set(pulls)
        assert all(reader.holds(SEED, here, there) for here, there in pulls.values())
        assert reader.transport.num_pulls == 0


@TRANSPORTS
def test_both_directions_at_once(tls: str | None) -> None:
    other = OwnerProcess(Options(seed=1, ucx_tls=tls))
    here = KVEngine(Options(seed=2, ucx_tls=tls))
    upper, lower = list(range(32, 64)), list(range(32))
    try:
        with closing(here):
            for n in range(5):
                other.hold(f"there-{n}", lower)
                here.hold(f"here-{n}", lower)
                other.pull(here.peer, f"here-{n}", upper, lower)
                here.pull(other.peer, f"there-{n}", upper, lower)
                done(here.event())
                done(other.event())
                assert here.holds(1, upper, lower)
                assert other.holds(2, upper, lower)
            wait_until(lambda: len(here.released) == 5 and len(other.state().released) == 5)
    finally:
        other.kill()


@TRANSPORTS
def test_a_claim_wakes_an_idle_owner(tls: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read over TCP needs the owner's thread several times, and so does the notification."""
    monkeypatch.setattr(nixl, "PAUSE_SHARE", 1000.0)  # idle at once, not in five seconds
    monkeypatch.setattr(nixl, "IDLE_PAUSE", 30.0)
    blocks = list(range(32))
    with OwnerProcess(Options(ucx_tls=tls)) as other, closing(KVEngine(Options(seed=SEED, ucx_tls=tls))) as here:
        here.hold("next-turn", blocks, revocable=True)
        started = time.monotonic()
        other.pull(here.peer, "next-turn", blocks, blocks)
        done(other.event())
        assert other.holds(SEED, blocks, blocks)
        wait_until(lambda: here.released == ["next-turn"])
        assert time.monotonic() - started < 10.0


@TRANSPORTS
def test_a_pull_meets_its_blocks_revocation_in_any_order(tls: str | None) -> None:
    """The owner gives blocks away while they are being claimed: they are read as they were on offer, or not at all."""
    outcomes = {"read": 0, "refused": 0}
    with OwnerProcess(Options(seed=SEED, ucx_tls=tls)) as owner, closing(KVEngine(Options(ucx_tls=tls))) as reader:
        for n in range(40):
            name, blocks = f"raced-{n}", [n % 16 * 4 + offset for offset in range(4)]
            owner.fill(blocks)
            owner.hold(name, blocks, revocable=True)
            reader.arena[:] = 0
            reader.pull(owner.peer, name, blocks, blocks)
            time.sleep(0.0005 * (n % 8))  # the race is about the time the claim takes
            revoked = owner.revoke()
            event = reader.event()
            if revoked is None:
                done(event)
                assert reader.holds(SEED, blocks, blocks)
                wait_until(lambda name=name: name in owner.state().released)  # type: ignore[misc]
                outcomes["read"] += 1
            else:
                assert revoked == name
                assert "revoked" in failed(event, "claim").detail
                assert not reader.arena.any()
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_what_one_action_runs_into_does_not_end_the_transfer_thread(
    owner: OwnerProcess, reader: KVEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks() -> None:
        raise MemoryError("as much as a peer says it has")

    assert reader.transport._do(breaks)
    owner.hold("after", [1, 2])
    reader.pull(owner.peer, "after", [3, 4], [1, 2])
    assert done(reader.event()).request_id == "after"
    assert not reader.transport.failed
    assert "MemoryError" in caplog.text


def test_releases_and_heartbeats_go_by_http(owner: OwnerProcess, reader: KVEngine) -> None:
    owner.hold("heartbeat", [1], duration=0.5)
    owner.hold("unread", [2])
    before = owner.state().num_renewed
    reader.transport.renew(owner.peer, ["heartbeat", "unknown"])
    reader.transport.release(owner.peer, "unread")
    wait_until(lambda: "unread" in owner.state().released)
    assert owner.state().num_renewed == before + 1


def test_refused_claim_fails_that_pull_only(owner: OwnerProcess, reader: KVEngine) -> None:
    owner.hold("lent", [3])
    reader.pull(owner.peer, "never-held", [0], [3])
    assert "lease_expired" in failed(reader.event(), "claim").detail
    reader.pull(owner.peer, "lent", [0], [3])
    done(reader.event())


@pytest.mark.parametrize(
    ("remote", "first_block", "hashed"),
    [
        ([3, 5], 0, [3, 5]),
        ([4, 3], 0, [4, 3]),
        ([4, 3], 0, [3, 4]),
        ([3, 3], 0, [3, 4]),
        ([3, 4], 0, [7, 8]),
        ([3, 4], 1, [3, 4]),
        ([3, 64], 0, [3, 4]),
    ],
    ids=["others", "reversed", "swapped", "repeated", "other content", "elsewhere", "beyond"],
)
def test_blocks_are_read_only_where_and_as_what_the_owner_holds_them(
    owner: OwnerProcess, reader: KVEngine, remote: list[int], first_block: int, hashed: list[int]
) -> None:
    name = f"forged-{remote}-{first_block}-{hashed}"
    owner.hold(name, [3, 4, 6])
    reader.pull(owner.peer, name, [0, 1], remote, first_block=first_block, block_hashes=names_of(hashed))
    failed(reader.event(), "hashes")
    assert not reader.arena.any()
    # At once, not when the claim runs out; and the owner is not held to be broken.
    wait_until(lambda: name in owner.state().released, 5.0)
    owner.hold(f"honest-{name}", [3, 4, 6])
    reader.pull(owner.peer, f"honest-{name}", [0, 1], [4, 6], first_block=1)
    done(reader.event())
    assert reader.holds(SEED, [0, 1], [4, 6])


def test_wrong_layout_is_never_read(owner: OwnerProcess, reader: KVEngine) -> None:
    claims = owner.state().num_claims
    reader.pull(owner.peer, "offered-other", [0], [0], layout="other")
    failed(reader.event(), "layout")
    with closing(KVEngine(Options(kv_layout="other"))) as other:
        other.pull(owner.peer, "of-other-engine", [0], [0], layout=None)
        failed(other.event(), "layout")
    with closing(KVEngine(Options(block_bytes=32768))) as other:
        other.pull(owner.peer, "of-other-size", [0], [0])
        failed(other.event(), "layout")
        assert other.transport.num_handshakes_failed == {"layout": 1}
    assert owner.state().num_claims == claims


def test_wrong_engine_id_is_refused_and_the_right_one_is_not_held_up(owner: OwnerProcess, reader: KVEngine) -> None:
    wrong = Peer("another-engine", owner.peer.host, owner.peer.port)
    for _ in range(2):
        reader.pull(wrong, "wrong-engine", [0], [6])
        failed(reader.event(), "engine_id")
    assert reader.transport.num_handshakes_failed == {"engine_id": 1}
    owner.hold("right-engine", [6])
    reader.pull(owner.peer, "right-engine", [0], [6])
    done(reader.event())
    assert reader.holds(SEED, [0], [6])


def test_own_blocks_are_not_pulled(reader: KVEngine) -> None:
    reader.pull(reader.peer, "self", [0], [1])
    failed(reader.event(), "engine_id")


def test_closed_port_fails_at_once_and_then_backs_off(reader: KVEngine) -> None:
    peer = Peer("gone", "127.0.0.1", free_port())
    started = time.monotonic()
    reader.pull(peer, "first", [0], [0])
    failed(reader.event(), "handshake")
    reader.pull(peer, "second", [0], [0])
    assert "next try" in failed(reader.event(), "handshake").detail
    assert time.monotonic() - started < 0.5
    assert reader.transport.num_handshakes_failed == {"handshake": 1}


@pytest.mark.parametrize(
    "answer", [None, b"\x00\xff\x17garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]
)
def test_port_without_an_engine_delays_nobody_else(owner: OwnerProcess, reader: KVEngine, answer: bytes | None) -> None:
    name = f"beside-{answer!r}"
    owner.hold(name, [7])
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept() -> None:
            connections.append(server.accept()[0])
            if answer is not None:
                connections[0].sendall(answer)
                connections[0].shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=accept)
        thread.start()
        started = time.monotonic()
        reader.pull(Peer("silent", "127.0.0.1", server.getsockname()[1]), "silent", [0], [0])
        reader.pull(owner.peer, name, [1], [7])
        first = reader.event()
        if answer is None:
            assert done(first).request_id == name
            failed(reader.event(), "handshake")
            assert time.monotonic() - started < reader.options.handshake_timeout + 1.0
        else:
            events = sorted([first, reader.event()], key=lambda event: isinstance(event, PullDone))
            failed(events[0], "handshake")
            done(events[1])
        thread.join(5)
        for connection in connections:
            connection.close()


def test_read_that_outlives_its_claim_is_thrown_away(reader: KVEngine) -> None:
    # The claim ends before even the first connection is made, which takes tens of milliseconds.
    owner = OwnerProcess(Options(seed=SEED, claim_seconds=0.002))
    try:
        owner.hold("short", [0, 1])
        reader.pull(owner.peer, "short", [0, 1], [0, 1])
        event = reader.event()
        if isinstance(event, PullStalled):
            event = reader.event()
            failed(event, "timeout")
        else:
            failed(event, "expired")
    finally:
        owner.kill()


def test_owner_killed_before_the_pull_and_restarted_on_the_same_port(reader: KVEngine) -> None:
    owner = OwnerProcess(Options(seed=1))
    try:
        owner.hold("before", [0])
        reader.pull(owner.peer, "before", [0], [0])
        done(reader.event())
        old = owner.peer
        owner.kill()
        reader.pull(old, "dead", [0], [0])
        failed(reader.event(), "claim")

        owner = OwnerProcess(Options(seed=2, port=old.port))
        assert owner.peer.port == old.port
        owner.hold("after", [9])
        reader.pull(owner.peer, "after", [0], [9])
        done(reader.event())
        assert reader.holds(2, [0], [9])
        reader.pull(old, "old-name", [0], [0])
        assert isinstance(reader.event(), PullFailed)
        wait_until(lambda: reader.transport.num_pulls == 0)
    finally:
        owner.kill()


@TRANSPORTS
def test_owner_that_hangs_in_a_read_stalls_only_its_own_pulls(
    owners: dict[str | None, OwnerProcess], tls: str | None
) -> None:
    healthy, name = owners[tls], f"beside-hung-{tls}"
    low, high = list(range(32)), list(range(32, 64))
    with (
        OwnerProcess(Options(seed=9, ucx_tls=tls)) as hung,
        ClaimGate(hung) as gate,
        closing(KVEngine(Options(ucx_tls=tls, transfer_timeout=1.0))) as reader,
    ):
        hung.hold("hangs", low)
        reader.pull(gate.peer, "hangs", low, low)
        wait_until(lambda: reader.transport.num_pulls == 1)
        healthy.hold(name, high)
        reader.pull(healthy.peer, name, high, high)
        assert done(reader.event()).request_id == name
        stalled = reader.event()
        assert isinstance(stalled, PullStalled), stalled
        # As long as the owner may go on, the blocks are not given back; meanwhile it is left alone.
        reader.pull(gate.peer, "in-back-off", high, high)
        failed(reader.event(), "timeout")
        reader.no_event(0.3)
        assert reader.transport.num_pulls == 1

        gate.closing = False
        hung.resume()
        failed(reader.event(), "timeout")
        reader.arena[low] = 0
        reader.no_event(0.3)
        assert not reader.arena[low].any(), "written to after PullFailed"
        assert hung.process.is_alive()

        wait_until(lambda: "hangs" in hung.state().released)
        hung.hold("again", low)

        def pulled_again() -> bool:
            reader.pull(gate.peer, "again", low, low)
            return isinstance(reader.event(), PullDone)

        wait_until(pulled_again)
        assert reader.holds(9, low, low)


def test_a_hang_is_noticed_at_the_deadline() -> None:
    with (
        OwnerProcess(Options()) as hung,
        ClaimGate(hung) as gate,
        closing(KVEngine(Options(transfer_timeout=1.0))) as reader,
    ):
        hung.hold("hangs", [0])
        started = time.monotonic()
        reader.pull(gate.peer, "hangs", [0], [0])
        assert isinstance(reader.event(), PullStalled)
        assert 0.95 < time.monotonic() - started < 2.0


@TRANSPORTS
def test_owner_killed_in_a_read(owners: dict[str | None, OwnerProcess], tls: str | None) -> None:
    blocks, name = list(range(64)), f"survivor-{tls}"
    with (
        OwnerProcess(Options(seed=9, ucx_tls=tls)) as owner,
        ClaimGate(owner) as gate,
        closing(KVEngine(Options(ucx_tls=tls))) as reader,
    ):
        owner.hold("dies", blocks)
        reader.pull(gate.peer, "dies", blocks, blocks)
        reader.no_event(0.5)
        killed = time.monotonic()
        owner.kill()
        failed(reader.event(), "disconnected")
        assert time.monotonic() - killed < 2.0
        reader.pull(gate.peer, "dead", [0], [0])
        failed(reader.event(), "disconnected")

        owners[tls].hold(name, [1])
        reader.pull(owners[tls].peer, name, [1], [1])
        done(reader.event())
        assert reader.holds(SEED, [1], [1])


@TRANSPORTS
def test_close_with_a_hung_read_is_quick_and_final(tls: str | None) -> None:
    blocks = list(range(64))
    with OwnerProcess(Options(seed=9, ucx_tls=tls)) as owner, ClaimGate(owner) as gate:
        reader = KVEngine(Options(ucx_tls=tls))
        owner.hold("hangs", blocks)
        reader.pull(gate.peer, "hangs", blocks, blocks)
        reader.no_event(0.5)
        started = time.monotonic()
        reader.close()
        assert time.monotonic() - started < 4.0
        assert isinstance(reader.event(1.0), PullFailed)
        reader.arena[:] = 0
        owner.resume()
        reader.no_event(0.3)
        assert not reader.arena.any(), "written to after close"
        reader.pull(gate.peer, "after-close", [0], [0])
        failed(reader.event(1.0), "transfer")


def test_close_ends_what_is_queued_and_sends_releases(owner: OwnerProcess) -> None:
    reader = KVEngine(Options(handshake_timeout=30.0))
    owner.hold("given-up", [8])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reader.pull(Peer("silent", "127.0.0.1", silent.getsockname()[1]), "waits", [0], [0])
        reader.transport.release(owner.peer, "given-up")
        started = time.monotonic()
        reader.close()
        assert time.monotonic() - started < 5.0
    failed(reader.event(1.0), "transfer")
    assert "given-up" in owner.state().released
    reader.transport.close()


def test_foreign_notifications_are_counted_and_ignored(owner: OwnerProcess, reader: KVEngine) -> None:
    from connectors.nixl_agent import NixlAgent
    from connectors.peer import AgentInfo

    arena = np.zeros(65536, np.uint8)
    sender = NixlAgent(arena.ctypes.data, 1, 65536, "DRAM", 0)
    remote = sender.connect(AgentInfo.model_validate(reader.transport.agent_info()))
    for message in (b"hello", b"done:", b"done:\xff\xfe", b"done:" + b"x" * 5000, b"done:known"):
        remote.notify(message)

    def arrived() -> bool:
        sender.notifications()
        return reader.transport.num_notifications == 5

    wait_until(arrived)
    assert reader.transport.num_bad_notifications == 4
    assert reader.released == ["known"]
    remote.disconnect()
    sender.close()


def test_two_hundred_pulls_leak_nothing(owner: OwnerProcess, reader: KVEngine) -> None:
    def pull(n: int) -> None:
        owner.hold(f"leak-{n}", [n % 64])
        reader.pull(owner.peer, f"leak-{n}", [n % 64], [n % 64])
        done(reader.event())
        reader.pull(owner.peer, f"refused-{n}", [0], [0])
        failed(reader.event(), "claim")

    for n in range(5):
        pull(n)
    process = psutil.Process()
    fds, threads = process.num_fds(), process.num_threads()
    for n in range(5, 205):
        pull(n)
    assert process.num_fds() <= fds
    assert process.num_threads() <= threads
    assert reader.transport.num_pulls == 0
    assert reader.transport.num_peers == 1
    wait_until(lambda: {f"leak-{n}" for n in range(205)} <= set(owner.state().released))


def test_threads_and_descriptors_are_gone_after_close(owner: OwnerProcess) -> None:
    def round_trip(n: int) -> None:
        with closing(KVEngine(Options())) as engine:
            owner.hold(f"round-{n}", [0])
            engine.pull(owner.peer, f"round-{n}", [0], [0])
            done(engine.event())

    round_trip(0)  # what NIXL keeps per process is made once
    process = psutil.Process()
    before = process.num_fds()
    for n in range(1, 4):
        round_trip(n)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("transfer", "peer-"))])
    wait_until(lambda: process.num_fds() <= before)


def test_idle_transport_costs_next_to_nothing(reader: KVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PAUSE_SHARE", 100.0)  # idle at once, not in five seconds

    def transfer_seconds() -> float:
        thread = next(t for t in threading.enumerate() if t.name == "transfer")
        with open(f"/proc/self/task/{thread.native_id}/schedstat") as stat:
            return int(stat.read().split()[0]) / 1e9

    for n in range(1_000):
        reader.hold(f"next-turn-{n}", [0], duration=480.0, revocable=True)
    wait_until(lambda: not reader.transport.num_pulls)
    started, before = time.monotonic(), transfer_seconds()
    reader.no_event(2.0)
    # The promise is 0.5 % of a core; a busy machine makes every wake-up dearer.
    assert (transfer_seconds() - before) / (time.monotonic() - started) < 0.01


def test_nixl_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    arena = np.zeros(65536, np.uint8)
    with pytest.raises(TransportError, match=r"^NIXL cannot start: [^\n]+$"):
        NixlTransport(
            engine_id="e",
            kv_layout=LAYOUT,
            base_address=arena.ctypes.data,
            num_blocks=1,
            block_bytes=65536,
            emit=lambda event: None,
        )
    assert os.environ["UCX_TLS"] == "no-such-transport"

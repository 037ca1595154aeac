from __future__ import annotations

import pytest

from connectors.fake import ByteMemory, FakeNetwork, FakeTransport, Fault
from connectors.lease import Leases
from connectors.transport import LeaseReleased, Peer, Pull, PullDone, PullFailed, TransferEvent

P = Peer("p", "p.test", 1)


class End:
    def __init__(self, network: FakeNetwork, peer: Peer, kv_layout: str = "x") -> None:
        self.events: list[TransferEvent] = []
        self.memory = ByteMemory(4, 2)
        self.leases = Leases(claim_seconds=10, clock=network.clock)
        self.transport = FakeTransport(
            network, peer, memory=self.memory, leases=self.leases, emit=self.events.append, kv_layout=kv_layout
        )


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def owner(network: FakeNetwork) -> End:
    owner = End(network, P)
    owner.memory.write(2, b"ab")
    owner.memory.write(3, b"cd")
    owner.leases.hold("theirs", [2, 3], 30)
    return owner


@pytest.fixture
def reader(network: FakeNetwork) -> End:
    return End(network, Peer("d", "d.test", 1))


def pull(peer: Peer = P, remote: tuple[int, ...] = (2, 3)) -> Pull:
    return Pull("mine", peer, "theirs", (0, 1), remote, "x")


def test_a_pull_copies_and_releases(network: FakeNetwork, owner: End, reader: End) -> None:
    reader.transport.pull(pull())
    assert reader.events == [], "a pull never happens inside the call"
    network.advance()
    assert (reader.memory.read(0), reader.memory.read(1)) == (b"ab", b"cd")
    assert reader.events == [PullDone("mine", 4, 0.0)]
    assert owner.events == [LeaseReleased("theirs")]


def test_each_step_takes_its_time(network: FakeNetwork, owner: End, reader: End) -> None:
    network.faults = lambda pull: Fault(before_claim=1, before_read=2, before_done=3, before_notify=4)
    reader.transport.pull(pull())
    network.advance(5.9)
    assert reader.events == []
    network.advance(0.1)
    assert reader.events == [PullDone("mine", 4, 5.0)]
    assert owner.events == []
    network.advance(4)
    assert owner.events == [LeaseReleased("theirs")]


def test_a_read_that_outlasts_its_claim_is_thrown_away(network: FakeNetwork, owner: End, reader: End) -> None:
    network.faults = lambda pull: Fault(before_read=10)
    reader.transport.pull(pull())
    network.advance(10)
    (event,) = reader.events
    assert isinstance(event, PullFailed)
    assert event.reason == "expired"


@pytest.mark.parametrize(
    ("peer", "remote", "reason"),
    [
        (Peer("p", "nowhere.test", 1), (2, 3), "handshake"),
        (Peer("p before its restart", "p.test", 1), (2, 3), "engine_id"),
        (P, (0, 1), "claim"),
    ],
)
def test_what_is_not_there_cannot_be_read(
    network: FakeNetwork, owner: End, reader: End, peer: Peer, remote: tuple[int, ...], reason: str
) -> None:
    reader.transport.pull(pull(peer, remote))
    network.advance()
    (event,) = reader.events
    assert isinstance(event, PullFailed)
    assert event.reason == reason


def test_a_peer_that_dies_while_read_disconnects(network: FakeNetwork, owner: End, reader: End) -> None:
    network.faults = lambda pull: Fault(before_read=1)
    reader.transport.pull(pull())
    network.advance(0.5)
    owner.transport.close()
    network.advance(1)
    (event,) = reader.events
    assert isinstance(event, PullFailed)
    assert event.reason == "disconnected"


def test_a_scripted_failure_leaves_half_of_the_blocks_written(network: FakeNetwork, owner: End, reader: End) -> None:
    network.faults = lambda pull: Fault(fails="transfer")
    reader.transport.pull(pull())
    network.advance()
    assert (reader.memory.read(0), reader.memory.read(1)) == (b"ab", b"\0\0")
    assert owner.events == []


def test_messages_can_be_late_or_lost(network: FakeNetwork, owner: End, reader: End) -> None:
    network.message_delay = 2
    reader.transport.renew(P, ["theirs"])
    reader.transport.release(P, "theirs")
    network.advance(1)
    assert owner.events == []
    network.advance(1)
    assert owner.events == [LeaseReleased("theirs")]
    owner.leases.hold("more", [1], 30)
    network.drop_messages = True
    reader.transport.release(P, "more")
    network.advance(5)
    assert len(owner.events) == 1

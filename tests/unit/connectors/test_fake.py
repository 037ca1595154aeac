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
    owner.leases.hold("theirs", [2, 3], ["aa", "bb"], 30)
    return owner


@pytest.fixture
def reader(network: FakeNetwork) -> End:
    return End(network, Peer("d", "d.test", 1))


def pull(
    peer: Peer = P, remote: tuple[int, ...] = (2, 3), first: int = 0, hashes: tuple[str, ...] = ("aa", "bb")
) -> Pull:
    return Pull("mine", peer, "theirs", tuple(range(len(remote))), remote, first, hashes, "x")


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
        (P, (0, 1), "hashes"),
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


@pytest.mark.parametrize(
    ("remote", "first", "hashes"),
    [
        ((3, 2), 0, ("aa", "bb")),
        ((2, 2), 0, ("aa", "bb")),
        ((3, 2), 0, ("bb", "aa")),
        ((2, 3), 0, ("aa", "xx")),
        ((2, 3), 1, ("aa", "bb")),
        ((2,), 1, ("aa",)),
        ((3,), 0, ("bb",)),
        ((3, 1), 1, ("bb", "cc")),
    ],
)
def test_what_the_lease_does_not_hold_there_is_not_read_and_the_claim_given_back(
    network: FakeNetwork, owner: End, reader: End, remote: tuple[int, ...], first: int, hashes: tuple[str, ...]
) -> None:
    reader.transport.pull(pull(P, remote, first, hashes))
    network.advance()
    (event,) = reader.events
    assert isinstance(event, PullFailed)
    assert event.reason == "hashes"
    assert not any(reader.memory.read(0))
    assert owner.events == [LeaseReleased("theirs")]


def test_a_part_of_a_lease_can_be_read(network: FakeNetwork, owner: End, reader: End) -> None:
    reader.transport.pull(pull(P, (3,), 1, ("bb",)))
    network.advance()
    assert (reader.memory.read(0), reader.memory.read(1)) == (b"cd", b"\0\0")


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
    owner.leases.hold("more", [1], ["cc"], 30)
    network.drop_messages = True
    reader.transport.release(P, "more")
    network.advance(5)
    assert len(owner.events) == 1


def test_an_unreachable_owner_answers_nothing_and_hears_nothing(network: FakeNetwork, owner: End, reader: End) -> None:
    network.unreachable = {"p"}
    reader.transport.pull(pull())
    reader.transport.release(P, "theirs")
    network.advance()
    assert isinstance(reader.events[0], PullFailed)
    assert (reader.events[0].reason, reader.transport.num_handshakes_failed) == ("handshake", {"handshake": 1})
    network.unreachable = set()
    network.faults = lambda pull: Fault(before_done=1)
    reader.transport.pull(pull())
    network.advance()
    network.unreachable = {"p"}
    network.advance(1)
    assert isinstance(reader.events[1], PullDone)
    assert (owner.events, len(owner.leases)) == ([], 1), "what was read is good, and its end unknown to the owner"

"""Peers that are killed, hang and are started again, at the NIXL transport: what is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from connectors import nixl, puller
from connectors.nixl_agent import NixlAgent
from connectors.transport import PullDone, PullFailed, PullStalled
from tests.integration.kv_engine import ClaimGate, KVEngine, Options, OwnerProcess, wait_until

BLOCKS = list(range(64))


@pytest.fixture(autouse=True)
def ucx_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVEngine sets UCX_TLS for the whole process."""
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVEngine]:
    """Forgets idle peers at once."""
    monkeypatch.setattr(nixl, "FORGET_INTERVAL", 0.05)
    monkeypatch.setattr(puller, "PEER_IDLE_SECONDS", 0.1)
    with closing(KVEngine(Options(transfer_timeout=1.0))) as reader:
        yield reader


def test_nothing_is_left_of_peers_that_come_and_go(reader: KVEngine) -> None:
    """Each is read from; then one is killed at rest, one while it hangs in a read, and one goes by itself."""
    process = psutil.Process()

    def visit(number: int) -> None:
        with OwnerProcess(Options(seed=number)) as owner, ClaimGate(owner) as gate:
            gate.closing = False
            owner.hold(f"first-{number}", BLOCKS)
            reader.pull(gate.peer, f"first-{number}", BLOCKS, BLOCKS)
            assert isinstance(reader.event(), PullDone)
            assert reader.holds(number, BLOCKS, BLOCKS)
            if number % 3 == 1:
                gate.closing = True
                owner.hold(f"second-{number}", BLOCKS)
                reader.pull(gate.peer, f"second-{number}", BLOCKS, BLOCKS)
                assert isinstance(reader.event(), PullStalled)
            owner.kill()
            if number % 3 == 1:
                assert isinstance(reader.event(), PullFailed)
            elif number % 3 == 2:
                reader.pull(gate.peer, f"second-{number}", BLOCKS, BLOCKS)
                assert isinstance(reader.event(), PullFailed)
        owner.process.close()
        wait_until(lambda: reader.transport.num_peers == 0)

    for number in range(3):
        visit(number)
    fds, threads = process.num_fds(), process.num_threads()
    for number in range(3, 9):
        visit(number)
    wait_until(lambda: process.num_fds() <= fds and process.num_threads() <= threads, 10)
    assert reader.transport.num_pulls == 0


@pytest.mark.parametrize("tls", [None, "tcp,self"], ids=["default", "tcp"])
def test_reader_killed_in_a_read_leaves_its_owner_alive(tls: str | None) -> None:
    """Its claim ends by itself, and the owner serves others."""
    with (
        OwnerProcess(Options(seed=9, ucx_tls=tls, claim_seconds=1.0)) as owner,
        ClaimGate(owner) as gate,
        closing(KVEngine(Options(ucx_tls=tls))) as other,
    ):
        for number in range(3):
            gate.closing = True
            with OwnerProcess(Options(ucx_tls=tls)) as reader:
                owner.hold(f"dies-{number}", BLOCKS)
                reader.pull(gate.peer, f"dies-{number}", BLOCKS, BLOCKS)
                wait_until(lambda: psutil.Process(owner.process.pid).status() == psutil.STATUS_STOPPED)
                other.no_event(0.3)  # the read is posted meanwhile
            gate.closing = False
            owner.resume()
            owner.hold(f"lives-{number}", BLOCKS)
            other.pull(owner.peer, f"lives-{number}", BLOCKS, BLOCKS)
            assert isinstance(other.event(), PullDone)
            assert other.holds(9, BLOCKS, BLOCKS)
            assert owner.process.is_alive()


def test_agent_that_breaks_is_told_at_once_and_fails_every_pull(
    reader: KVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(reader.transport, "_on_failure", told.append)
    with OwnerProcess(Options(seed=1)) as owner, ClaimGate(owner) as gate:
        owner.hold("hangs", [0])
        reader.pull(gate.peer, "hangs", [0], [0])
        reader.no_event(0.3)

        def breaks(agent: NixlAgent) -> list[bytes]:
            raise RuntimeError("NIXL_ERR_BACKEND")

        monkeypatch.setattr(NixlAgent, "notifications", breaks)
        reader.transport.wake()
        event = reader.event()
        assert isinstance(event, PullFailed)
        assert event.request_id == "hangs"
        assert told == ["KV can no longer be exchanged: RuntimeError: NIXL_ERR_BACKEND"]
        assert reader.transport.failed
        reader.pull(owner.peer, "later", [0], [0])
        assert isinstance(reader.event(1.0), PullFailed)
        reader.arena[:] = 0
        owner.resume()
        reader.no_event(0.3)
        assert not reader.arena.any(), "written to after PullFailed"

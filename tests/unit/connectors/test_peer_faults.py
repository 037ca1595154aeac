"""A peer that dies, hangs, talks nonsense or is replaced, in each step of an exchange: over an agent that is scripted
and HTTP that is real."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from connectors.peer import AgentInfo
from connectors.transport import Peer, PullDone, PullFailed
from tests.unit.connectors.test_puller import ME, OWNER, Bench

Strike = Callable[[BaseHTTPRequestHandler], None]
AGENT, CLAIM, RELEASE = "/kv/agent", "/kv/claim", "/kv/release"


def answers(status: int, body: object, *, promised: int = 0) -> Strike:
    """`promised`: bytes that the header announces and that never come."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def strike(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data) + promised))
        handler.end_headers()
        handler.wfile.write(data)
        handler.close_connection = bool(promised)

    return strike


def dies(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


class Faulty(Bench):
    """A peer that fails in some way when it is asked for some path, once its hour has come; and one that never does."""

    def __init__(self) -> None:
        self.strikes: dict[str, Strike] = {}
        self.healed = threading.Event()
        super().__init__()
        self.other = Bench()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        faulty, sound = self, super()._handler()

        class Handler(sound):  # type: ignore[misc,valid-type]
            def do_GET(self) -> None:
                if not faulty._strikes(self):
                    super().do_GET()

            def do_POST(self) -> None:
                if not faulty._strikes(self):
                    super().do_POST()

        return Handler

    def _strikes(self, handler: BaseHTTPRequestHandler) -> bool:
        strike = self.strikes.get(handler.path)
        if strike is None:
            return False
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        strike(handler)
        return True

    def hangs(self, handler: BaseHTTPRequestHandler) -> None:
        self.healed.wait(10)
        handler.close_connection = True

    def close(self) -> None:
        self.healed.set()
        super().close()
        self.other.close()


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    faulty = Faulty()
    faulty.puller._handshake_timeout = 0.3
    yield faulty
    faulty.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("peer-")]


RESTARTED = answers(409, {"error": {"message": "this is another engine", "code": "engine_mismatch"}})
WITHOUT_HASHES = answers(200, {"valid_for": 30.0, "block_ids": [0, 1], "claim_id": "x"})
FAULTS: dict[str, tuple[str, Strike | None, str]] = {
    "dies in the handshake": (AGENT, dies, "handshake"),
    "hangs in the handshake": (AGENT, None, "handshake"),
    "talks nonsense in the handshake": (AGENT, answers(200, b"\x00garbage"), "handshake"),
    "breaks off in the handshake": (AGENT, answers(200, OWNER.to_json(), promised=100), "handshake"),
    "fails in the handshake": (AGENT, answers(500, {"error": {"message": "no"}}), "handshake"),
    "is another engine by now": (
        AGENT,
        answers(200, OWNER.model_copy(update={"engine_id": "b"}).to_json()),
        "engine_id",
    ),
    "is another model": (AGENT, answers(200, OWNER.model_copy(update={"kv_layout": "b"}).to_json()), "layout"),
    "has blocks of another size": (
        AGENT,
        answers(200, OWNER.model_copy(update={"block_bytes": 7}).to_json()),
        "layout",
    ),
    "is ourselves": (AGENT, answers(200, ME.to_json()), "engine_id"),
    "dies in the claim": (CLAIM, dies, "claim"),
    "hangs in the claim": (CLAIM, None, "claim"),
    "talks nonsense in the claim": (CLAIM, answers(200, [1, 2, 3]), "claim"),
    "leaves out the hashes": (CLAIM, WITHOUT_HASHES, "claim"),
    "breaks off in the claim": (CLAIM, answers(200, {"valid_for": 30.0}, promised=100), "claim"),
    "redirects the claim": (CLAIM, answers(302, {}), "claim"),
    "was restarted before the claim": (CLAIM, RESTARTED, "engine_id"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_peer_that_fails_costs_its_own_pulls_and_no_other(faulty: Faulty, fault: str) -> None:
    path, strike, reason = FAULTS[fault]
    faulty.strikes[path] = strike or faulty.hangs
    faulty.pull("struck")
    faulty.pull("beside", peer=faulty.other.peer)
    faulty.until(lambda: len(faulty.agent.reads) == 1)
    faulty.agent.reads[0].state = True
    faulty.until(lambda: len(faulty.events) == 2)
    events = {event.request_id: event for event in faulty.events}
    assert isinstance(events["beside"], PullDone)
    struck = events["struck"]
    assert isinstance(struck, PullFailed)
    assert struck.reason == reason, struck.detail
    assert faulty.puller.num_pulls == 0
    assert len(faulty.agent.reads) == 1, "nothing was read from it"


@pytest.mark.parametrize("strike", [dies, None, answers(200, b"\x00garbage"), RESTARTED])
def test_releases_that_come_to_nothing_hold_nobody_up(faulty: Faulty, strike: Strike | None) -> None:
    faulty.strikes[RELEASE] = strike or faulty.hangs
    for number in range(3):
        faulty.puller.release(faulty.peer, f"unread-{number}")
    faulty.pull("beside", peer=faulty.other.peer)
    faulty.until(lambda: len(faulty.agent.reads) == 1)
    faulty.agent.reads[0].state = True
    faulty.until(lambda: bool(faulty.events))
    assert isinstance(faulty.events[0], PullDone)


def test_peer_restarted_on_its_port_again_and_again_leaves_one_link(faulty: Faulty) -> None:
    for number in range(20):
        info: AgentInfo = OWNER.model_copy(update={"engine_id": f"e{number}", "agent_name": f"a{number}"})
        faulty.strikes[AGENT] = answers(200, info.to_json())
        faulty.pull(f"r{number}", peer=Peer(f"e{number}", faulty.peer.host, faulty.peer.port))
        faulty.until(lambda count=number: len(faulty.agent.reads) == count + 1)
        faulty.agent.reads[-1].state = True
        faulty.until(lambda count=number: len(faulty.events) == count + 1)
        assert isinstance(faulty.events[-1], PullDone)
        faulty.step()
        assert (faulty.puller.num_peers, faulty.agent.num_links) == (1, 1)

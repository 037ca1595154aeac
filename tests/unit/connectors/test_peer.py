"""PeerClient and Lane against servers that answer well, badly, slowly and not at all."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from connectors import lane as lane_module
from connectors.lane import MAX_QUEUED, Lane
from connectors.peer import MAX_ANSWER_BYTES, AgentInfo, BadAnswer, PeerClient, PeerError, PeerUnreachable, Refused

INFO = {
    "version": 1,
    "engine_id": "engine",
    "agent_name": "agent",
    "agent_metadata": base64.b64encode(b"\x00opaque").decode(),
    "base_address": 4096,
    "num_blocks": 8,
    "block_bytes": 1024,
    "kv_layout": "layout",
    "memory": "DRAM",
    "device_id": 0,
}
CLAIM = {"valid_for": 25.0, "block_ids": [2, 1], "block_hashes": ["aa", "bb"], "claim_id": "c"}


def http(body: object, status: str = "200 OK", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data


@contextmanager
def server(*scripts: Callable[[socket.socket], None] | bytes) -> Iterator[tuple[PeerClient, list[bytes]]]:
    """A server that plays one script per connection: bytes answer one request and close."""
    requests: list[bytes] = []
    connections: list[socket.socket] = []

    def read_request(connection: socket.socket) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                return False
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                while len(body) < int(line.split(b":")[1]):
                    body += connection.recv(65536)
        requests.append(head + b"\n" + body)
        return True

    def play() -> None:
        for script in scripts:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            connections.append(connection)
            try:
                if isinstance(script, bytes):
                    if read_request(connection):
                        connection.sendall(script)
                        connection.close()
                else:
                    while read_request(connection):
                        script(connection)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=play)
        thread.start()
        client = PeerClient("127.0.0.1", listener.getsockname()[1])
        yield client, requests
        client.close()
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()
    thread.join(5)
    assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_every_exchange_over_one_connection() -> None:
    answers = iter([INFO, CLAIM, {"renewed": 2}, {"released": True}, {"released": True}])
    with server(lambda connection: connection.sendall(http(next(answers)))) as (client, requests):
        info = client.agent(soon())
        assert info.agent_metadata == b"\x00opaque"
        assert info.to_json() == INFO
        before = time.monotonic()
        claim = client.claim("engine", "r-1", "reader", soon())
        assert (claim.block_ids, claim.block_hashes, claim.claim_id) == ((2, 1), ("aa", "bb"), "c")
        assert before <= claim.sent_at <= time.monotonic()
        assert claim.valid_until == claim.sent_at + 25.0
        assert client.renew("engine", ["r-1", "r-2"], soon()) == 2
        assert client.release("engine", "r-1", soon())
        assert client.release("engine", "r-1", soon(), "c")
    lines = [request.split(b" HTTP/1.1")[0] for request in requests]
    assert lines == [b"GET /kv/agent", b"POST /kv/claim", b"POST /kv/renew", *[b"POST /kv/release"] * 2]
    assert json.loads(requests[3].splitlines()[-1]) == {"engine_id": "engine", "request_id": "r-1"}
    assert json.loads(requests[4].splitlines()[-1]) == {"engine_id": "engine", "request_id": "r-1", "claim_id": "c"}
    assert json.loads(requests[1].splitlines()[-1]) == {
        "engine_id": "engine", "request_id": "r-1", "reader": "reader",
    }  # fmt: skip
    assert json.loads(requests[2].splitlines()[-1]) == {"engine_id": "engine", "request_ids": ["r-1", "r-2"]}


def test_claim_counts_from_before_it_was_sent() -> None:
    def slowly(connection: socket.socket) -> None:
        time.sleep(0.2)  # what the test is about: the answer takes its time
        connection.sendall(http(CLAIM))

    with server(slowly) as (client, _):
        before = time.monotonic()
        claim = client.claim("engine", "r", "reader", soon())
        assert claim.valid_until < before + 25.1


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced() -> None:
    with server(http(CLAIM), http(CLAIM)) as (client, requests):
        client.claim("engine", "r-1", "reader", soon())
        client.claim("engine", "r-2", "reader", soon())
        assert len(requests) == 2


@pytest.mark.parametrize(
    ("status", "code"), [("409 Conflict", "engine_mismatch"), ("410 Gone", "lease_expired"), ("503 No", 503)]
)
def test_refusals_carry_status_and_code(status: str, code: str | int) -> None:
    with (
        server(http({"error": {"message": "no", "type": "x", "code": code}}, status)) as (client, _),
        pytest.raises(Refused, match="no") as caught,
    ):
        client.claim("engine", "r", "reader", soon())
    assert (caught.value.status, caught.value.code) == (int(status.split()[0]), str(code))


BAD_CLAIMS: list[Any] = [
    [],
    None,
    "text",
    {},
    {"valid_for": 25.0},
    *(
        CLAIM | change
        for change in (
            {"valid_for": "25"},
            {"valid_for": True},
            {"valid_for": 0},
            {"valid_for": -1.0},
            {"valid_for": 1e9},
            {"block_ids": [-1]},
            {"block_ids": [1.0]},
            {"block_ids": [True]},
            {"block_ids": {"0": 1}},
            {"block_hashes": None},
            {"block_hashes": [1]},
            {"block_hashes": "aabb"},
            {"claim_id": ""},
            {"claim_id": 1},
        )
    ),
]


@pytest.mark.parametrize("body", BAD_CLAIMS, ids=str)
def test_claims_of_the_wrong_shape_are_bad_answers(body: object) -> None:
    with server(http(body)) as (client, _), pytest.raises(BadAnswer):
        client.claim("engine", "r", "reader", soon())


BAD_INFOS: list[dict[str, Any]] = [
    {"version": 2},
    {"version": "1"},
    {"version": True},
    {"engine_id": ""},
    {"engine_id": 7},
    {"agent_name": "x" * 513},
    {"agent_metadata": ""},
    {"agent_metadata": "not base64!"},
    {"agent_metadata": [1]},
    {"base_address": 0},
    {"base_address": 1 << 63},
    {"base_address": "4096"},
    {"num_blocks": 0},
    {"num_blocks": 1 << 23},
    {"block_bytes": 0},
    {"block_bytes": 1.5},
    {"kv_layout": None},
    {"memory": "DISK"},
    {"device_id": -1},
]


@pytest.mark.parametrize("change", BAD_INFOS, ids=str)
def test_agent_infos_of_the_wrong_shape_are_bad_answers(change: dict[str, Any]) -> None:
    with server(http({**INFO, **change})) as (client, _), pytest.raises(BadAnswer, match=next(iter(change))):
        client.agent(soon())


def test_agent_info_with_unknown_keys_is_read() -> None:
    with server(http({**INFO, "later": 1})) as (client, _):
        assert client.agent(soon()).engine_id == "engine"


BAD_BYTES = [
    b"",
    b"\x00\x01\x02\xff" * 50,
    b"SSH-2.0-OpenSSH_9\r\n",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    http(b"{not json"),
    http(b"\xff\xfe"),
    http(b"[" * 100_000),
    http(b'{"valid_for": NaN, "block_ids": []}'),
    http(CLAIM, "302 Found", "Location: http://127.0.0.1:1/\r\n"),
    http(CLAIM, "201 Created"),
    http(b"<html>oops</html>", "502 Bad Gateway"),
    http({"error": "text"}, "410 Gone"),
    http(b"", "404 Not Found"),
]


@pytest.mark.parametrize("answer", BAD_BYTES, ids=range(len(BAD_BYTES)))
def test_garbage_is_an_error_within_the_deadline(answer: bytes) -> None:
    started = time.monotonic()
    with server(answer, answer) as (client, _), pytest.raises((BadAnswer, PeerUnreachable)):
        client.claim("engine", "r", "reader", soon(2.0))
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("chunked", [False, True])
def test_endless_bodies_are_cut_short(chunked: bool) -> None:
    num_sent = 0

    def endless(connection: socket.socket) -> None:
        nonlocal num_sent
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 1000000000000"
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n")
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n" if chunked else b"x" * 65536
        while True:
            connection.sendall(piece)
            num_sent += len(piece)

    with server(endless) as (client, _), pytest.raises(BadAnswer, match="more than"):
        client.agent(soon())
    assert num_sent < 8 * MAX_ANSWER_BYTES


def test_an_answer_that_drips_ends_at_the_deadline() -> None:
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in http(INFO):
            connection.sendall(bytes([byte]))
            if stop.wait(0.02):
                return

    with server(drip) as (client, _):
        started = time.monotonic()
        with pytest.raises(PeerUnreachable, match="timed out"):
            client.agent(soon(0.3))
        assert 0.25 < time.monotonic() - started < 1.0
        stop.set()


def test_endless_interim_answers_end_at_the_deadline() -> None:
    def interim(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with server(interim) as (client, _), pytest.raises(PeerError):
        client.agent(soon(0.3))


def test_silence_and_a_closed_port() -> None:
    with server(lambda connection: None) as (client, _), pytest.raises(PeerUnreachable, match="timed out"):
        client.agent(soon(0.2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerUnreachable, match="refused"):
        PeerClient("127.0.0.1", port).agent(soon())


@pytest.mark.parametrize("host", ["", "no-such-host.invalid", "a" * 300, "bad host\r\nX: y"])
def test_hosts_that_make_no_sense(host: str) -> None:
    with pytest.raises(PeerError):
        PeerClient(host, 1).agent(soon(5.0))


def test_a_deadline_that_has_passed_sends_nothing() -> None:
    with server(http(INFO)) as (client, requests):
        with pytest.raises(PeerUnreachable, match="timed out"):
            client.agent(time.monotonic() - 1.0)
        assert not requests


def test_lane_fails_what_queues_behind_a_hanging_exchange_together_with_it() -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lane = Lane("127.0.0.1", silent.getsockname()[1])
        started = time.monotonic()
        for _ in range(10):
            lane.call(lambda client, deadline: client.agent(deadline), 0.3, answers.put)
        results = [answers.get(timeout=5) for _ in range(10)]
        assert all(isinstance(result, PeerUnreachable) for result in results)
        assert time.monotonic() - started < 1.0
        lane.close()
        lane.join(5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peer-")]


def test_an_exchange_that_breaks_in_an_unforeseen_way_is_answered_and_no_other_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def breaks(client: PeerClient, deadline: float) -> AgentInfo:
        raise MemoryError("an answer too long")

    answers: SimpleQueue[object] = SimpleQueue()
    with server(lambda connection: connection.sendall(http(INFO))) as (client, _):
        lane = Lane(client._host, client._port)
        lane.call(breaks, 5.0, answers.put)
        lane.call(lambda client, deadline: client.agent(deadline), 5.0, answers.put)
        broken, good = answers.get(timeout=5), answers.get(timeout=5)
        assert isinstance(broken, PeerError)
        assert "MemoryError" in str(broken)
        assert isinstance(good, AgentInfo)
        lane.close()
        lane.join(5)
    assert "MemoryError" in caplog.text


def test_an_idle_lane_ends_its_thread_and_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "IDLE_SECONDS", 0.01)
    answers: SimpleQueue[object] = SimpleQueue()
    with server(*[lambda connection: connection.sendall(http(INFO))] * 2) as (client, requests):
        lane = Lane(client._host, client._port)
        for _ in range(2):
            lane.call(lambda client, deadline: client.agent(deadline), 5.0, answers.put)
            assert isinstance(answers.get(timeout=5), AgentInfo)
            until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("peer-")])
            assert lane.idle
        assert len(requests) == 2
        lane.close()
        lane.join(5)
        lane.call(lambda client, deadline: client.agent(deadline), 5.0, answers.put)
        assert isinstance(answers.get(timeout=5), PeerUnreachable), "closed"


def test_lane_is_bounded_and_can_be_broken_off() -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lane = Lane("127.0.0.1", silent.getsockname()[1])
        for _ in range(MAX_QUEUED + 2):
            lane.call(lambda client, deadline: client.release("e", "r", deadline), 60.0, answers.put)
        assert isinstance(answers.get(timeout=5), PeerUnreachable)
        lane.close()
        lane.join(0.1)
        broken_off = [answers.get(timeout=5) for _ in range(MAX_QUEUED + 1)]
        assert all(isinstance(answer, PeerUnreachable) for answer in broken_off)
        lane.join(5)


def test_own_agent_info_survives_the_wire() -> None:
    info = AgentInfo.model_validate({**INFO, "agent_metadata": b"\x01\x02"})
    assert AgentInfo.model_validate(json.loads(json.dumps(info.to_json()))) == info

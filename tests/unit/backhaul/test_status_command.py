"""`backhaul status` against real servers: a table, JSON, and one line for what is wrong."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from backhaul import status
from backhaul.__main__ import main
from backhaul.errors import CommandError
from backhaul.status_view import table

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "ready": True,
    "draining": False,
    "turns_in_flight": 3,
    "engines": [
        {
            "url": "http://p:8100",
            "role": "prefill",
            "state": "ready",
            "in_flight": 1,
            "dispatched": 9,
            "models": ["a", "b", "c", "d"],
            "num_models": 4,
            "capabilities": {
                "kind": {"value": "vllm", "source": "seen"},
                "version": {"value": "0.32.0\u001b[31m", "source": "seen"},
                "block_size": {"value": 32, "source": "stated"},
                "streams_carry_params": {"value": False, "source": "assumed"},
                "tokenize": {"value": True, "source": "seen"},
            },
            "lowers": [{"capability": "release", "value": False, "words": "blocks wait"}],
        }
    ],
    "turns": {"ok": 7, "failed": 0},
    "plans": {"new": 4, "affinity": 3},
    "last_kv": {"offered": 3},
    "releases": {},
    "lowered": [{"what": "pull", "why": "block_size", "count": 2}],
}


BUSY = {
    **STATUS,
    "at": 1000.0,
    "processes": 2,
    "turns_waiting": {"prefill": 2, "decode": 1},
    "redis": {"state": "ok", "why": "", "latency_ms": {"p50": 0.314, "p99": 1.9}},
    "engines": [
        STATUS["engines"][0]
        | {
            "state": "suspect",
            "why": "timeout",
            "since": 700.0,
            "load": {"running": 5, "waiting": 6, "kv_use": 0.417, "blocks_idle": 70},
        }
    ],
    "recent": {
        "buckets": [
            {"at": 5, "turns": 1, "tokens": {"cached": 30, "computed": 10}},
            {"at": 9, "tokens": {"pulled": 60}},
        ],
        "turns": [
            {
                "at": 999.0,
                "endpoint": "chat",
                "outcome": "ok",
                "turn": 2,
                "plan": "affinity",
                "kv": "offered",
                "prefill": "http://p:8100",
                "decode": "http://d:8200",
                "tokens": {"prompt": 100, "cached": 30, "pulled": 60, "computed": 10, "completion": 8},
                "first_byte_ms": 41.6,
                "ms": 801.2,
            }
        ],
    },
}


@contextmanager
def serving(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.path == "/admin/status"
            self.send_response(status if good else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps(STATUS).encode()) as url:
        assert main(["status", "--url", url + "/v1/"]) == 0
    out = capsys.readouterr().out
    assert f"backhaul 0.1.0 at {url}: ready, 3 turns in flight\n" in out
    now, can, *_ = [" ".join(line.split()) for line in out.splitlines() if line.startswith("prefill")]
    assert now == "prefill http://p:8100 ready - 1 - - - - a, b, c and 1 more"
    assert can == "prefill http://p:8100 vllm 0.32.0?[31m 32 ? no* yes ?"
    assert "release     blocks wait" in out
    assert "turns                  7 ok\n" in out
    assert "done without           2 pull (block_size)\n" in out
    assert "\x1b" not in out


def test_what_is_no_router_says_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps({**STATUS, "turns": {"\x1b[2J": "many"}}).encode()) as url:
        assert main(["status", "--url", url]) == 1
    with socket.create_server(("127.0.0.1", 0)) as server:

        def tell() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x1b[2J\r\n\r\n")

        thread = threading.Thread(target=tell)
        thread.start()
        assert main(["status", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 1
        thread.join()
    err = capsys.readouterr().err
    assert err.count("?[2J") == 2
    assert "\x1b" not in err


def test_what_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps(BUSY).encode()) as url:
        assert main(["status", "--url", url]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert out[0] == f"backhaul 0.1.0 at {url} (2 processes): ready, 3 turns in flight, 3 waiting"
    assert out[1] == "Redis answers, p50 0.31 ms, p99 1.90 ms"
    assert out[3] == "100 prompt tokens in 15 minutes [████████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓····]"
    assert out[4] == "█ 30 % in prefill engines' caches, ▓ 60 % pulled from decode engines, · 10 % computed"
    assert "prefill http://p:8100 suspect (timeout) 5 min 1 5 6 42 % 70 a, b, c and 1 more" in out
    (turn,) = [line for line in out if "affinity offered" in line]
    assert turn.endswith("chat ok 2 affinity offered p:8100 d:8200 100 30 60 10 42 801")


def test_redis_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    redis = {"state": "silent", "why": "ConnectionError", "latency_ms": {"p50": 0.3}}
    with serving(json.dumps({**STATUS, "redis": redis}).encode()) as url:
        assert main(["status", "--url", url]) == 0
    assert "Redis does not answer (ConnectionError)\n" in capsys.readouterr().out


def test_watching_goes_on_until_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A router that is not there at one time may be there at the next."""
    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == 1:
            monkeypatch.setattr(status, "fetch", real)
        elif len(seen) == 3:
            raise KeyboardInterrupt

    def nobody(url: str, timeout: float) -> bytes:
        raise CommandError("no answer")

    real = status.fetch
    monkeypatch.setattr(status, "fetch", nobody)
    monkeypatch.setattr(status.time, "sleep", sleep)
    with serving(json.dumps(BUSY).encode()) as url:
        assert main(["status", "--url", url, "--watch", "--interval", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.index("no answer") < out.index("backhaul 0.1.0 at")
    assert out.count("backhaul 0.1.0 at") == 2
    assert "\x1b" not in out
    assert seen == [0.5] * 3


def test_watching_a_terminal_shows_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    monkeypatch.setattr(status.sys, "stdout", terminal)
    monkeypatch.setattr(status.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with serving(json.dumps(BUSY).encode()) as url:
        assert main(["status", "--url", url, "--watch"]) == 0
    shown = terminal.getvalue()
    assert shown.startswith("\x1b[H\x1b[Jbackhaul 0.1.0")
    rows = shown.removeprefix("\x1b[H\x1b[J").splitlines()
    assert len(rows) == 5
    assert max(map(len, rows)) <= 39


def test_json_is_what_the_router_says(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps(STATUS).encode()) as url:
        assert main(["status", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_exit_code_tells_whether_turns_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps({**STATUS, "ready": False}).encode()) as url:
        assert main(["status", "--url", url]) == 1
    assert ": not ready, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{}", 404, "answered with status 404; is it a router"),
        (b"{}", 500, "answered with status 500"),
        (b"<html>", 200, "no status of a router: the answer"),
        (b'{"version": 1}', 200, "no status of a router: version"),
    ],
)
def test_what_is_no_status_is_one_line(
    body: bytes, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(body, status) as url:
        assert main(["status", "--url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"backhaul status: --url {url}: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://h", "http://[", "http://h:x"])
def test_nobody_there_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_long_cells_are_cut() -> None:
    assert list(table(("A", "B"), [("x" * 9, "y")], limit=4)) == ["A     B", "xxx…  y"]

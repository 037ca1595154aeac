"""`backhaul status` against real servers: a table, JSON, and one line for what is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from backhaul.__main__ import main
from backhaul.status import table

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
    row = next(line for line in out.splitlines() if line.startswith("prefill"))
    assert " ".join(row.split()) == "prefill http://p:8100 ready 1 vllm 0.32.0?[31m 32 ? no* yes ? a, b, c and 1 more"
    assert "release     blocks wait" in out
    assert "turns                  7 ok\n" in out
    assert "done without           2 pull (block_size)\n" in out
    assert "\x1b" not in out


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

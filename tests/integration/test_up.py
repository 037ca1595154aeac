"""`backhaul up` as a user runs it, on a tiny model.

It becomes ready and says so in FILE; chats; ends quickly on SIGTERM and Ctrl-C; says which part died; and whatever
ends it, kill -9 included, leaves no process behind. What cannot work is said in one line before anything is started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.tiny_vlm import make_tiny_vlm

START_SECONDS = 60.0
STOP_SECONDS = 10.0


@dataclass
class Up:
    process: subprocess.Popen[bytes]
    file: Path
    log: Path

    def ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_SECONDS
        while not self.file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return dict(json.loads(self.file.read_text()))

    def ended(self) -> tuple[int, str]:
        return self.process.wait(STOP_SECONDS), self.log.read_text()


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Any]:
    started: list[Up] = []

    def start(*flags: str, model: Path | None = None) -> Up:
        number = len(started)
        file, log = tmp_path / f"up{number}.json", tmp_path / f"up{number}.log"
        command = [sys.executable, "-m", "backhaul", "up", "--port", "0", "--json", str(file)]
        command += ["--model", str(model or tiny_model), "--threads", "1", "--max-model-len", "512", *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
            )
        up = Up(process, file, log)
        started.append(up)
        return up

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def parts(facts: dict[str, Any]) -> list[psutil.Process]:
    pids = [facts["router"]["pid"], facts["store"]["pid"], *(engine["pid"] for engine in facts["engines"])]
    return [psutil.Process(pid) for pid in pids]


def assert_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"still there: {process}"
            time.sleep(0.02)


def wait_for_children(up: Up, *words: str) -> list[psutil.Process]:
    """The children of `up`, once each word is in the command line of one of them."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert up.process.poll() is None, up.log.read_text()
        assert time.monotonic() < deadline
        children = psutil.Process(up.process.pid).children()
        lines = [" ".join(child.cmdline()) for child in children]
        # Until it has become the program, a child is the launcher with the program's command line as arguments.
        if all(any(word in line and " -I -S " not in line for line in lines) for word in words):
            return children
        time.sleep(0.02)


def chat(facts: dict[str, Any]) -> dict[str, Any]:
    body = {"model": facts["model"], "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{facts['base_url']}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return dict(json.load(response))


def sample(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)


def test_it_serves_and_ends_on_sigterm(start: Any, tmp_path: Path) -> None:
    up = start("--served-model-name", "tiny", "--decode", "2")
    facts = up.ready()
    assert set(facts) == {"base_url", "model", "router", "engines", "store"}
    assert facts["base_url"] == f"{facts['router']['url']}/v1"
    assert facts["model"] == "tiny"
    assert [set(part) for part in (facts["router"], facts["store"])] == [{"url", "pid"}] * 2
    assert [engine["role"] for engine in facts["engines"]] == ["prefill", "decode", "decode"]
    assert all(set(engine) == {"url", "role", "pid"} for engine in facts["engines"])
    assert stat.S_IMODE(up.file.stat().st_mode) == 0o600
    children = parts(facts)
    password = facts["store"]["url"].split(":")[2].split("@")[0]
    for process in (up.process.pid, *(child.pid for child in children)):
        assert password not in Path(f"/proc/{process}/cmdline").read_text()

    answer = chat(facts)
    assert answer["usage"]["completion_tokens"] >= 1

    shown = up.log.read_text()
    for part in (
        facts["base_url"],
        "curl ",
        "from openai import OpenAI",
        "store: ",
        "prefill: ",
        "decode-2: ",
        "router: ",
    ):
        assert part in shown
    assert password not in shown
    page = next(line.split()[1] for line in shown.splitlines() if line.startswith("  status "))
    with urllib.request.urlopen(page, timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/html")

    began = time.monotonic()
    up.process.terminate()
    code, _ = up.ended()
    assert code == 0
    assert time.monotonic() - began < 5
    assert_gone(children)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("backhaul-")]


def test_pictures_are_encoded_by_an_encoder(start: Any, tmp_path: Path) -> None:
    up = start("--encoder", model=make_tiny_vlm(tmp_path / "vlm"))
    picture = tmp_path / "picture.png"
    Image.new("RGB", (48, 40), (200, 30, 90)).save(picture)
    facts = up.ready()
    assert [engine["role"] for engine in facts["engines"]] == ["prefill", "decode", "encode"]
    assert "chat --base-url" in up.log.read_text()
    flags = ("--base-url", facts["base_url"], "--image", str(picture), "--max-tokens", "4")
    chat = [sys.executable, "-m", "backhaul", "chat", *flags]
    said = subprocess.run(chat, input=b"What is it?\nAnd now?\n", capture_output=True, timeout=60, check=True)
    assert len(said.stderr.splitlines()) == 2
    encoded = {engine["role"]: sample(engine["url"], "backhaul_engine_encodes_total") for engine in facts["engines"]}
    assert encoded == {"encode": 1, "prefill": 0, "decode": 0}
    assert sample(facts["router"]["url"], "backhaul_router_media_total") == 2
    up.process.terminate()
    assert up.ended()[0] == 0


def test_ctrl_c_while_starting_ends_it(start: Any) -> None:
    up = start()
    children = wait_for_children(up, "engine")
    up.process.send_signal(signal.SIGINT)
    code, shown = up.ended()
    assert code == 0
    assert "Traceback" not in shown
    assert not up.file.exists()
    assert_gone(children)


def test_a_part_that_dies_ends_it_and_is_named(start: Any) -> None:
    up = start()
    facts = up.ready()
    children = parts(facts)
    os.kill(facts["engines"][1]["pid"], signal.SIGKILL)
    code, shown = up.ended()
    assert code == 1
    assert "backhaul up: decode died (killed by SIGKILL); the last lines of " in shown
    assert "Traceback" not in shown
    assert_gone(children)


def test_a_store_that_dies_while_the_engines_load_ends_it(start: Any) -> None:
    up = start()
    children = wait_for_children(up, "valkey-server", "engine")
    os.kill(next(child.pid for child in children if "valkey-server" in child.cmdline()[0]), signal.SIGKILL)
    code, shown = up.ended()
    assert code == 1
    assert "backhaul up: store died (killed by SIGKILL)" in shown
    assert not up.file.exists()
    assert_gone(children)


def test_kill_9_leaves_nobody(start: Any) -> None:
    up = start()
    children = parts(up.ready())
    up.process.kill()
    up.process.wait()
    assert_gone(children)


def test_a_port_that_is_taken_is_said_at_once(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, shown = start("--port", str(port)).ended()
    assert code == 1
    assert shown.count("\n") == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in shown
    assert "--port, or 0 for a free one" in shown


def test_a_model_that_cannot_be_loaded_is_one_line(start: Any, tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"not a model at all")
    up = start(model=model)
    up.process.wait(START_SECONDS)
    code, shown = up.ended()
    assert code == 1
    assert "Traceback" not in shown
    last = shown.splitlines()[-1]
    assert last.startswith(("backhaul up: prefill: ", "backhaul up: decode: "))
    assert "broken.gguf" in last

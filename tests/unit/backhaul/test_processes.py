from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from backhaul import processes
from backhaul.processes import ChildDied

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def wait_for_text(path: Path, text: str) -> None:
    async with asyncio.timeout(10):
        while not (path.exists() and text in path.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_pid_is_the_programs_and_its_output_is_in_the_log(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getpid(), os.environ['X'], flush=True); print('oops', file=sys.stderr)"
    child = await processes.start("c", python(code), log=tmp_path / "log", env={"X": "1"})
    assert await child.wait() == 0
    assert child.tail() == [f"{child.pid} 1", "oops"]
    assert child.tail(1) == ["oops"]


async def test_stop_ends_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    child = await processes.start("c", python(STUBBORN), log=tmp_path / "log")
    await wait_for_text(tmp_path / "log", "up")
    began = time.monotonic()
    await child.stop(grace=0.2)
    assert child.process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 5


async def test_stop_after_the_end_does_nothing(tmp_path: Path) -> None:
    child = await processes.start("c", python("raise SystemExit(3)"), log=tmp_path / "log")
    assert await child.wait() == 3
    await child.stop(grace=1)


async def test_kill_takes_what_the_child_started_with_it(tmp_path: Path) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    child = await processes.start("c", python(code), log=tmp_path / "log")
    await wait_for_text(tmp_path / "log", "\n")
    grandchild = psutil.Process(int((tmp_path / "log").read_text()))
    child.kill()
    await child.wait()
    assert await asyncio.to_thread(_gone, grandchild)


def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, sys
from backhaul import processes
async def main():
    child = await processes.start("c", [sys.executable, "-c", {STUBBORN!r}], log=pathlib.Path({str(tmp_path)!r}, "log"))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 10
        while "up" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(parent.pid, signal.SIGKILL)
    assert _gone(child)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('backhaul engine: m.gguf: not a GGUF file'); raise SystemExit(1)", "prefill: m.gguf: not a GGUF file"),
        (
            "print('a'); print('b'); raise SystemExit(7)",
            "prefill died (exit code 7); the last lines of {log}:\n  | a\n  | b",
        ),
        ("import os; os.kill(os.getpid(), 9)", "prefill died (killed by SIGKILL); the last lines of {log}:"),
    ],
)
async def test_the_message_of_a_death(tmp_path: Path, code: str, message: str) -> None:
    child = await processes.start("prefill", python(code), log=tmp_path / "log")
    await child.wait()
    assert str(ChildDied(child)) == message.format(log=tmp_path / "log")


def _gone(process: psutil.Process) -> bool:
    """True once it has ended; a zombie that nobody reaps in this container has ended as well."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False

"""Child processes that never outlive this one, each with its own log file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backhaul.errors import CommandError

# Runs between fork and exec, in a fresh interpreter: preexec_fn is not safe beside the threads of a progress
# display. The kernel then kills the child when this process is gone, however it went; the parent may be gone
# already before that is arranged, so look once more. The pid stays the same through the exec.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> int:
        return await self.process.wait()

    def tail(self, num_lines: int = 15) -> list[str]:
        """The last lines the child wrote."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as lines:
                return [line.rstrip() for line in deque(lines, maxlen=num_lines)]
        except OSError:
            return []

    async def stop(self, grace: float) -> None:
        """Ask it to end; after `grace` seconds end it, and what it started."""
        if self.process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)  # it leads its own session, see start()
        except ProcessLookupError:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            self.process.send_signal(number)
        except ProcessLookupError:
            pass


async def start(name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> Child:
    """Start `command`; what it prints goes to `log`. `env` is added to this process's environment."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            # Ctrl-C in a terminal reaches the whole foreground group; the order of stopping is ours.
            start_new_session=True,
        )
    return Child(name, process, log)


class ChildDied(CommandError):
    """A child ended that should not have; the message is followed by the last lines of its log."""

    def __init__(self, child: Child) -> None:
        super().__init__(_obituary(child))


def describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _obituary(child: Child) -> str:
    tail = child.tail()
    # Our own programs end with one line that says what to do: that line is the message.
    for line in reversed(tail):
        if child.process.returncode in (1, 2) and line.startswith("backhaul "):
            return f"{child.name}: {line.partition(': ')[2]}"
    how = describe_exit(child.process.returncode or 0)
    return "\n".join([f"{child.name} died ({how}); the last lines of {child.log}:", *(f"  | {line}" for line in tail)])

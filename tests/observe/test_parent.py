"""The parent of a router's processes, with children that are none: whatever these do, it goes on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

START = """
import os, signal, socket, sys, time
import router.processes
from router.processes import Processes
from router.siblings import Frame, Frames

def say(channel, *frames):
    channel.sendall(b"".join(frame.pack() for frame in frames))

def is_first(mark="first"):
    try:
        os.close(os.open(sys.argv[1] + "/" + mark, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
"""


@asynccontextmanager
async def parent(folder: object, script: str, num: int = 1) -> AsyncIterator[asyncio.subprocess.Process]:
    """With children whose `work` the script has."""
    code = f"{START}\n{script}\nsys.exit(Processes({num}, work).run())"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(folder), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(20):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_process_that_is_not_understood_is_replaced(tmp_path: object) -> None:
    script = """
def work(channel):
    say(channel, Frame("listens"))
    if is_first():
        channel.sendall(b"\\xff" * 8)
    else:
        print("another", flush=True)
    time.sleep(60)
"""
    async with parent(tmp_path, script) as process:
        assert await line(process) == "another"
        process.terminate()
        await process.wait()


async def test_process_that_hangs_is_replaced(tmp_path: object) -> None:
    script = """
router.processes.HUNG_SECONDS = 2

def work(channel):
    say(channel, Frame("listens"))
    if is_first():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(60)
    print("another", flush=True)
    for _ in range(60):
        time.sleep(0.5)
        say(channel, Frame("reply", bodies=[b""]))
"""
    async with parent(tmp_path, script) as process:
        assert await line(process) == "another"
        process.terminate()
        assert await process.wait() == 1


async def test_process_that_hangs_holds_up_no_shutdown(tmp_path: object) -> None:
    script = """
router.processes.HUNG_SECONDS = 2

def work(channel):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("started", flush=True)
    time.sleep(60)
"""
    async with parent(tmp_path, script) as process:
        assert await line(process) == "started"
        process.terminate()
        assert await process.wait() == 1


async def test_new_process_knows_what_is_to_be_kept_before_it_listens(tmp_path: object) -> None:
    script = """
def work(channel):
    if is_first():
        say(channel, Frame("listens"), Frame("ask", 1, "drain", "the engine", [b"order"]))
        channel.recv(1 << 16)
        return 3
    [frame] = Frames().feed(channel.recv(1 << 16))
    print(frame.kind, frame.bodies[0].decode(), flush=True)
    time.sleep(60)
"""
    async with parent(tmp_path, script) as process:
        assert await line(process) == "drain order"
        process.terminate()
        await process.wait()


async def test_signal_to_a_process_that_just_begins_is_for_that_alone(tmp_path: object) -> None:
    """Not also for the parent, whose means of being woken it has for a moment."""
    script = """
os.register_at_fork(after_in_child=lambda: is_first() and os.kill(os.getpid(), signal.SIGTERM))

def work(channel):
    print("unharmed", flush=True)
    time.sleep(60)
"""
    async with parent(tmp_path, script) as process:
        assert await process.wait() == 1, "as if it had ended by itself while it started"

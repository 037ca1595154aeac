"""Several processes of one router behind one port: their parent serves nothing, but starts them, starts another for one
that dies, passes signals on, and keeps what each has counted.

The parent has no event loop and no threads, so that it can fork at any time: what it has read and checked, each process
has from the start.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from router import totals
from router.metrics import RESTARTS
from router.siblings import GATHER_SECONDS, METRICS, SNAPSHOT, Frame, Frames
from router.tally import Counts

LONGEST_PAUSE: Final = 30.0
"""Seconds until another process is started for one that died soon."""
SOON: Final = 60.0
HUNG_SECONDS: Final = 30
"""Without a word of a process, though each tells every second what it has counted: it hangs."""
NO_FORK_SECONDS: Final = 1.0
MAX_UNSENT_BYTES: Final = 64 << 20
MAX_KEPT: Final = 1000
"""Questions that processes started later are asked too; beyond, the oldest are forgotten."""

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

Work = Callable[[socket.socket], int]
"""What a process does, given its end of a pair of sockets: until its exit code."""

log = logging.getLogger("router.processes")


@dataclass(eq=False, slots=True)
class _Process:
    place: int
    pid: int
    channel: socket.socket
    started: float
    listens: bool = False
    last: totals.Snapshot = field(default_factory=dict)
    """What it has counted, as it told last."""
    is_late: bool = False
    """It has not answered in time, and is not waited for until it is heard from."""
    num_silent: int = 0
    """Seconds in which nothing was heard from it."""
    has_hung_up: bool = False
    unsent: bytearray = field(default_factory=bytearray)
    frames: Frames = field(default_factory=Frames)


@dataclass(eq=False, slots=True)
class _Question:
    asker: _Process
    number: int
    """As the asker knows it."""
    kind: str
    due: float
    waiting: set[_Process]
    answers: list[bytes] = field(default_factory=list)


class Processes:
    def __init__(self, num: int, work: Work, *, listening: Callable[[], None] = lambda: None) -> None:
        """`listening` is called once all of them do."""
        self._num = num
        self._work = work
        self._listening = listening
        self._processes: dict[int, _Process] = {}
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._kept: dict[str, Frame] = {}
        self._due: dict[int, float] = {}
        """When another process is to be started, by its place."""
        self._pauses = [0.0] * num
        self._next_look = 0.0
        self._all_have_listened = False
        self._stopping = False
        self._code = 0
        self._selector = selectors.DefaultSelector()
        self._totals = totals.Totals()
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._restarts = Counts(*RESTARTS, [], registry=registry)

    def run(self) -> int:
        """Until they have ended, having been told to. Returns the exit code."""
        told, tell = socket.socketpair()
        for end in (told, tell):
            end.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        woken_before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        self._selector.register(told, selectors.EVENT_READ)
        try:
            for place in range(self._num):
                self._start(place)
            while self._processes or (self._due and not self._stopping):
                for key, events in self._selector.select(self._patience()):
                    if key.fileobj is told:
                        for number in told.recv(1 << 10):
                            self._signalled(signal.Signals(number))
                    else:
                        self._attend(key.data, events)
                self._reap()
                self._see_to_what_is_due()
                self._end_what_hangs()
            return self._code
        finally:
            signal.set_wakeup_fd(woken_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            told.close()
            tell.close()

    # Processes.

    def _start(self, place: int) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes just now is for us, or for it; not for both
        try:
            pid = os.fork()
            if pid == 0:
                self._be_one(ours, theirs)
        except OSError as error:  # there are too many, or too little memory, for now
            log.error("no process can be started", extra={"number": place, "why": error.strerror})
            self._due[place] = time.monotonic() + NO_FORK_SECONDS
            ours.close()
            theirs.close()
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        theirs.close()
        ours.setblocking(False)
        self._processes[pid] = process = _Process(place, pid, ours, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, process)
        log.info("process started", extra={"number": place, "pid": pid})
        for frame in self._kept.values():  # before it takes a request
            self._send(process, frame)

    def _be_one(self, ours: socket.socket, theirs: socket.socket) -> None:
        """What the new process does, and all it does."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            os.setpgid(0, 0)  # what a terminal sends to all of a group comes through the parent, once
            self._selector.close()
            for one in (ours, *(each.channel for each in self._processes.values())):
                one.close()
            code = self._work(theirs)
        except BaseException:
            log.critical("a process failed", exc_info=True)
        finally:
            with suppress(OSError, ValueError):
                logging.shutdown()
            os._exit(code)

    def _reap(self) -> None:
        while self._processes:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (process := self._processes.pop(pid, None)) is not None:
                self._ended(process, os.waitstatus_to_exitcode(status))

    def _ended(self, process: _Process, code: int) -> None:
        with suppress(OSError, ValueError):
            while data := process.channel.recv(1 << 16):  # its last words
                self._heard(process, data)
        self._hang_up(process)
        process.channel.close()
        self._totals.bury(process.last)
        lived = time.monotonic() - process.started
        if self._stopping:
            told_early = not process.listens and code == -signal.SIGTERM
            self._code = self._code or (0 if told_early else min(abs(code), 1))
            return
        level = logging.INFO if code == 0 else logging.ERROR
        log.log(level, "process ended", extra={"number": process.place, "pid": process.pid, "code": code})
        if not process.listens and not self._all_have_listened:
            self._code = 1  # what is wrong with the settings of one is wrong with those of all
            self._stop(signal.SIGTERM)
            return
        pause = self._pauses[process.place] if lived < SOON else 0.0
        self._pauses[process.place] = min(max(1.0, 2 * pause), LONGEST_PAUSE)
        self._due[process.place] = time.monotonic() + pause

    def _end_what_hangs(self) -> None:
        """It would get connections all the same, and hold up a shutdown. Only seconds that we had ourselves count:
        where a whole machine has stood still, nobody has said anything for long."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 1.0
        for process in self._processes.values():
            process.num_silent += process.listens or self._stopping
            if process.num_silent == HUNG_SECONDS:
                log.error("process hangs, and is ended", extra={"number": process.place, "pid": process.pid})
                self._kill(process, signal.SIGKILL)

    def _kill(self, process: _Process, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    def _signalled(self, number: signal.Signals) -> None:
        if number != signal.SIGCHLD:
            self._stop(number)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        self._due.clear()
        for process in self._processes.values():
            self._kill(process, number)

    # What they say.

    def _attend(self, process: _Process, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(process)
        if events & selectors.EVENT_READ:
            try:
                data = process.channel.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                try:
                    self._heard(process, data)
                except ValueError as error:
                    log.error("process is not understood, and is ended", extra={"pid": process.pid, "why": str(error)})
                    self._kill(process, signal.SIGKILL)
                    self._hang_up(process)
            else:
                self._hang_up(process)  # it is about to end

    def _hang_up(self, process: _Process) -> None:
        if not process.has_hung_up:
            process.has_hung_up = True
            self._selector.unregister(process.channel)
            for question in self._questions.values():
                question.waiting.discard(process)

    def _heard(self, process: _Process, data: bytes) -> None:
        process.is_late, process.num_silent = False, 0
        for frame in process.frames.feed(data):
            match frame.op:
                case "listens":
                    self._listens(process)
                case "snapshot":
                    process.last = totals.read(frame.bodies[0])
                case "ask":
                    self._ask(process, frame)
                case "reply":
                    self._replied(process, frame)

    def _listens(self, process: _Process) -> None:
        process.listens = True
        for frame in self._kept.values():  # those that came meanwhile, among them
            self._send(process, frame)
        if self._all_have_listened:
            self._send(process, Frame("go"))
        elif len(self._processes) == self._num and all(one.listens for one in self._processes.values()):
            self._all_have_listened = True
            for one in self._processes.values():
                self._send(one, Frame("go"))
            self._listening()

    def _ask(self, asker: _Process, frame: Frame) -> None:
        number = next(self._numbers)
        kind = SNAPSHOT if frame.kind == METRICS else frame.kind
        question = Frame("ask", number, kind, bodies=frame.bodies)
        if frame.keep:
            self._kept.pop(frame.keep, None)
            self._kept[frame.keep] = question._replace(number=0)
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        asked = {
            one
            for one in self._processes.values()
            if (one.listens or one is asker) and not (one.is_late or one.has_hung_up)
        }
        due = time.monotonic() + GATHER_SECONDS
        self._questions[number] = _Question(asker, frame.number, frame.kind, due, asked)
        for one in asked:
            self._send(one, question)

    def _replied(self, process: _Process, frame: Frame) -> None:
        question = self._questions.get(frame.number)
        [body] = frame.bodies
        if question is not None and question.kind == METRICS:
            process.last = totals.read(body)
        if question is not None and process in question.waiting:
            question.waiting.discard(process)
            question.answers.append(body)

    def _exposition(self) -> bytes:
        own = totals.read(totals.snapshot(self._registry))
        self._totals.living = [*(one.last for one in self._processes.values()), own]
        return generate_latest(self._totals)

    # What is to be done at some time.

    def _patience(self) -> float:
        due = [self._next_look, *self._due.values(), *(one.due for one in self._questions.values())]
        return max(0.0, min(due) - time.monotonic())

    def _see_to_what_is_due(self) -> None:
        now = time.monotonic()
        for place in [place for place, due in self._due.items() if due <= now]:
            del self._due[place]
            self._restarts.add()
            self._start(place)
        for number, question in list(self._questions.items()):
            if not question.waiting or question.due <= now:
                del self._questions[number]
                for late in question.waiting:
                    late.is_late = True
                bodies = [self._exposition()] if question.kind == METRICS else question.answers
                if question.asker.pid in self._processes:
                    self._send(question.asker, Frame("replies", question.number, bodies=bodies))

    # Sending, without waiting for who does not read.

    def _send(self, process: _Process, frame: Frame) -> None:
        if not process.has_hung_up and len(process.unsent) < MAX_UNSENT_BYTES:
            process.unsent += frame.pack()
            self._flush(process)

    def _flush(self, process: _Process) -> None:
        events = selectors.EVENT_READ
        try:
            while process.unsent:
                del process.unsent[: process.channel.send(process.unsent)]
        except BlockingIOError:
            events |= selectors.EVENT_WRITE
        except OSError:  # it ends, which is told when it is read
            process.unsent.clear()
        self._selector.modify(process.channel, events, process)

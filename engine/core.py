"""The engine's loop, on the process's main thread: take in, schedule, compute, hand out.

The other threads reach it through its inbox, a queue of plain values, and hear of it through `emit`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from connectors.base import Connector
from connectors.transport import TransferEvent
from engine.batch import Batch, StepResult
from engine.media.schedule import MediaSchedule
from engine.messages import EncoderTransfer, Inbox, Output, Shutdown, Stop, Submit
from engine.request import Request
from engine.runner import RunnerError

logger = logging.getLogger(__name__)

MAX_IDLE_SECONDS = 60.0
"""An idle engine looks up this often even if nothing is due."""
FAILED = "the engine failed and is restarting; try again"


class EngineFailed(Exception):
    """The loop cannot go on; every request it knew has had an error as its last output."""


class StepRunner(Protocol):
    """Computes one step; `engine.runner.Runner` is the real one."""

    def run(self, batch: Batch) -> StepResult:
        """Store the KV of every scheduled token, and sample for each request that samples. Raises RunnerError if what
        came out is not fit to be sampled from."""


class StepScheduler(Protocol):
    """Says what each step computes; `engine.scheduler.Scheduler`, or that of an engine that only encodes pictures."""

    @property
    def requests(self) -> Mapping[str, Request]:
        """Every unfinished request."""

    @property
    def media(self) -> MediaSchedule: ...
    def add(self, request: Request) -> None: ...
    def stop(self, message: Stop) -> None: ...
    def settle(self, event: TransferEvent) -> None: ...
    def update_leases(self, now: float) -> None: ...
    def fail(self, requests: Sequence[Request], message: str) -> None: ...
    def abort_all(self) -> None: ...
    def take_outputs(self) -> list[Output]: ...
    def schedule(self) -> Batch | None: ...
    def finish_step(self, batch: Batch, result: StepResult) -> None: ...


@dataclass(frozen=True, slots=True)
class StepStats:
    """One computed step."""

    num_requests: int
    num_tokens: int
    seconds: float


class EngineCore:
    """Runs a scheduler and a runner until told to shut down."""

    def __init__(
        self,
        scheduler: StepScheduler,
        runner: StepRunner,
        connector: Connector,
        inbox: SimpleQueue[Inbox],
        emit: Callable[[list[Output]], None],
        stats: Callable[[StepStats], None] = lambda stats: None,
        on_failure: Callable[[str], None] = lambda message: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_failure` is told first of all when the loop cannot go on: nothing more should be sent to it."""
        self.scheduler = scheduler
        self.runner = runner
        self.connector = connector
        self.inbox = inbox
        self._emit = emit
        self._stats = stats
        self._on_failure = on_failure
        self._clock = clock
        self._shutdown = False
        self._last_step_failed = False

    def run(self) -> None:
        """Serve until Shutdown. Raises EngineFailed, after one line in the log, rather than serve wrong answers."""
        try:
            while not self._shutdown:
                self.step()
            self.take_in()
            self.scheduler.abort_all()
            self.hand_out()
        except Exception as error:
            logger.critical("the engine cannot go on and exits: %s: %s", type(error).__name__, error)
            logger.debug("what led to it", exc_info=error)
            self._on_failure(FAILED)
            self._fail_all()
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self.connector.close()
            self.scheduler.media.connector.close()

    def step(self) -> None:
        self.take_in()
        self.scheduler.update_leases(self._clock())
        batch = self.scheduler.schedule()
        if batch is None:
            self.hand_out()
            self.wait()
            return
        result = self.compute(batch)
        # Whoever was aborted during the step ends before its tokens count: nothing is held for a client that left.
        self.take_in()
        if result is not None:
            self.scheduler.finish_step(batch, result)
        self.hand_out()

    def take_in(self) -> None:
        """Handle what has come in; does not wait."""
        while True:
            try:
                message = self.inbox.get_nowait()
            except Empty:
                return
            self._handle(message)

    def compute(self, batch: Batch) -> StepResult | None:
        """What came of it, or None if the step failed: nothing of it counts, the requests at fault end, the others are
        scheduled again as they were. A second failure in a row is the engine's, not the requests'."""
        started = self._clock()
        try:
            result = self.runner.run(batch)
        except RunnerError as error:
            if self._last_step_failed:
                raise
            self._last_step_failed = True
            requests = [item.request for item in batch.scheduled]
            at_fault = [request for request in requests if request.request_id in error.request_ids] or requests
            logger.error("a step failed: %s; %d requests end with an error", error, len(at_fault))
            self.scheduler.fail(at_fault, f"the engine could not compute this request: {error}")
            return None
        self._last_step_failed = False
        self._stats(StepStats(len(batch.scheduled), batch.num_tokens, self._clock() - started))
        return result

    def hand_out(self) -> None:
        outputs = self.scheduler.take_outputs()
        if outputs:
            self._emit(outputs)

    def wait(self) -> None:
        """Sleep until something comes in, a lease runs out or a heartbeat is due."""
        if self._shutdown:
            return
        wakeups = (self.connector.next_wakeup(), self.scheduler.media.next_wakeup())
        wakeup = min((at for at in wakeups if at is not None), default=None)
        seconds = MAX_IDLE_SECONDS if wakeup is None else min(MAX_IDLE_SECONDS, max(0.0, wakeup - self._clock()))
        try:
            message = self.inbox.get(timeout=seconds)
        except Empty:
            return
        self._handle(message)

    def _handle(self, message: Inbox) -> None:
        if isinstance(message, Submit):
            self.scheduler.add(message.request)
        elif isinstance(message, Stop):
            self.scheduler.stop(message)
        elif isinstance(message, Shutdown):
            self._shutdown = True
        elif isinstance(message, EncoderTransfer):
            self.scheduler.media.settle(message.event)
        else:
            self.scheduler.settle(message)

    def _fail_all(self) -> None:
        """The last output of every open request. Takes nothing of the scheduler for granted but who is open."""
        self._emit([Output(request_id, [], "error", error=FAILED) for request_id in self.scheduler.requests])

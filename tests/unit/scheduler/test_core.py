"""The engine's loop: what it does with its inbox, with failures, and at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, Queue, SimpleQueue

import pytest

from connectors.base import NullConnector
from connectors.fake import FakeClock, Fault
from connectors.transport import LeaseReleased
from connectors.wire.transfer import KVTransferParams
from engine.batch import Batch, StepResult
from engine.blocks import BlockPool
from engine.core import MAX_IDLE_SECONDS, EngineCore, EngineFailed, StepStats
from engine.messages import Inbox, Output, Shutdown, Stop, Submit
from engine.request import Request
from engine.runner import RunnerError
from engine.scheduler import Scheduler
from tests.fake_engines import LEASE_SECONDS, FakeEngine, pair
from tests.fake_runner import FakeKV, FakeRunner, expected_output, make_request, prompt_of


class Watched(NullConnector):
    def __init__(self) -> None:
        self.closed = 0
        self.wakeup: float | None = None
        self.asked = threading.Event()

    def next_wakeup(self) -> float | None:
        self.asked.set()
        return self.wakeup

    def close(self) -> None:
        self.closed += 1


class Loop:
    """An EngineCore on a thread of its own, seen from the outside.

    `script(number of the step, batch)` is called before each step and may raise.
    """

    def __init__(self, script: Callable[[int, Batch], None] = lambda number, batch: None) -> None:
        self.script = script
        self.runner = FakeRunner(FakeKV(64))
        self.num_steps = 0
        self.connector = Watched()
        self.inbox: SimpleQueue[Inbox] = SimpleQueue()
        self.outputs: Queue[Output] = Queue()
        self.stats: list[StepStats] = []
        self.error: Exception | None = None
        self.scheduler = Scheduler(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=1000,
            pool=BlockPool(64),
            connector=self.connector,
        )
        self.told_of_failure: list[tuple[int, int]] = []
        """When it was: so many outputs had come, and so often was the connector closed."""
        self.core = EngineCore(
            self.scheduler,
            self,
            self.connector,
            self.inbox,
            self._emit,
            self.stats.append,
            on_failure=lambda message: self.told_of_failure.append((self.outputs.qsize(), self.connector.closed)),
        )
        self.thread = threading.Thread(target=self._target, daemon=True)

    def __enter__(self) -> Loop:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.inbox.put(Shutdown())
        self.join()

    def join(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()

    def submit(self, prompt: list[int], **options) -> Request:
        request = make_request(prompt, **options)
        self.inbox.put(Submit(request))
        return request

    def finals(self, count: int) -> dict[str, Output]:
        """The last outputs of the next `count` requests to end, with all their tokens."""
        tokens: dict[str, list[int]] = {}
        finals: dict[str, Output] = {}
        while len(finals) < count:
            output = self.outputs.get(timeout=10)
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finished:
                finals[output.request_id] = output
        self.tokens = tokens
        return finals

    def run(self, batch: Batch) -> StepResult:
        self.num_steps += 1
        self.script(self.num_steps, batch)
        return self.runner.run(batch)

    def _emit(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def _target(self) -> None:
        try:
            self.core.run()
        except EngineFailed as error:
            self.error = error


def test_requests_are_answered_in_the_background() -> None:
    with Loop() as loop:
        requests = [loop.submit(prompt_of(9, seed), max_tokens=6) for seed in range(3)]
        finals = loop.finals(3)
    for seed, request in enumerate(requests):
        assert finals[request.request_id].finish_reason == "length"
        assert loop.tokens[request.request_id] == expected_output(prompt_of(9, seed), max_tokens=6)
    assert sum(stats.num_tokens for stats in loop.stats) == 3 * (9 + 5)


def test_an_idle_loop_sleeps_until_something_comes_in() -> None:
    with Loop() as loop:
        assert loop.connector.asked.wait(10)
        request = loop.submit(prompt_of(3), max_tokens=1)
        assert request.request_id in loop.finals(1)


class NothingComes(SimpleQueue):
    """An inbox that lets the time of a wait pass on the test's clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.waits: list[float] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Inbox:
        assert timeout is not None, "every wait has a timeout"
        self.waits.append(timeout)
        self.clock.now += timeout
        raise Empty


def test_an_idle_loop_wakes_when_a_lease_runs_out() -> None:
    p, _, network = pair()
    inbox = NothingComes(network.clock)
    core = EngineCore(p.scheduler, p.runner, p.connector, inbox, lambda outputs: None, clock=network.clock)
    p.prefill(prompt_of(9))
    core.step()
    assert (inbox.waits, p.pool.num_used) == ([LEASE_SECONDS], 3)
    core.step()
    assert (inbox.waits[1:], p.pool.num_used) == ([MAX_IDLE_SECONDS], 0)


def test_an_idle_loop_wakes_for_heartbeats() -> None:
    p, d, network = pair(decode={"num_blocks": 3})
    inbox = NothingComes(network.clock)
    core = EngineCore(d.scheduler, d.runner, d.connector, inbox, lambda outputs: None, clock=network.clock)
    network.faults = lambda pull: Fault(before_read=100)
    d.submit(prompt_of(9), params=p.prefill(prompt_of(9)))
    d.submit(prompt_of(9, 1), params=p.prefill(prompt_of(9, 1)))
    for _ in range(4):
        core.step()
    assert inbox.waits == [LEASE_SECONDS / 6] * 4
    assert len(d.transport.renewals) == 4


def test_a_stop_ends_a_request() -> None:
    started = threading.Event()
    with Loop(lambda number, batch: started.set()) as loop:
        request = loop.submit(prompt_of(3), max_tokens=900)
        assert started.wait(10)
        loop.inbox.put(Stop(request.request_id, aborted=True))
        assert loop.finals(1)[request.request_id].finish_reason == "abort"


def test_an_abort_during_the_last_step_counts() -> None:
    def abort(number: int, batch: Batch) -> None:
        inbox.put(Stop(batch.scheduled[0].request.request_id, aborted=True))

    with Loop(abort) as loop:
        inbox = loop.inbox
        request = loop.submit(prompt_of(3), max_tokens=1)
        final = loop.finals(1)[request.request_id]
    assert (final.finish_reason, final.token_ids) == ("abort", [])


def test_a_failed_step_ends_the_request_at_fault_and_no_other() -> None:
    def fail(number: int, batch: Batch) -> None:
        if number == 1:
            raise RunnerError("the model's output is not finite", [batch.scheduled[0].request.request_id])

    loop = Loop(fail)
    bad = loop.submit(prompt_of(3), max_tokens=4)
    good = loop.submit(prompt_of(9, 1), max_tokens=4)
    with loop:
        finals = loop.finals(2)
    assert finals[bad.request_id].finish_reason == "error"
    assert "not finite" in (finals[bad.request_id].error or "")
    assert loop.tokens[good.request_id] == expected_output(prompt_of(9, 1), max_tokens=4)
    assert loop.error is None
    assert loop.scheduler.pool.num_used == 0


def test_a_failed_step_that_blames_nobody_ends_them_all() -> None:
    def fail(number: int, batch: Batch) -> None:
        if number == 1:
            raise RunnerError("the model's output is not finite", [])

    loop = Loop(fail)
    requests = [loop.submit(prompt_of(3, seed)) for seed in range(2)]
    with loop:
        finals = loop.finals(2)
        assert {finals[request.request_id].finish_reason for request in requests} == {"error"}
        later = loop.submit(prompt_of(5, 2), max_tokens=2)
        assert loop.finals(1)[later.request_id].finish_reason == "length"


@pytest.mark.parametrize(
    "first",
    [
        RunnerError("bad", []),
        ValueError("bug"),
        MemoryError("no room"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["repeated", "unexpected", "no memory", "no memory for a tensor"],
)
def test_the_loop_ends_rather_than_serve_wrong_answers(first: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail(number: int, batch: Batch) -> None:
        raise first

    loop = Loop(fail)
    with caplog.at_level(logging.INFO):
        requests = [loop.submit(prompt_of(3, seed)) for seed in range(2)]
        loop.thread.start()
        if isinstance(first, RunnerError):
            loop.finals(2)
            requests = [loop.submit(prompt_of(3))]
        finals = loop.finals(len(requests))
        loop.join()
    assert {finals[request.request_id].finish_reason for request in requests} == {"error"}
    assert loop.error is not None
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL] == [
        f"the engine cannot go on and exits: {type(first).__name__}: {first}"
    ]
    assert loop.connector.closed == 1
    assert loop.told_of_failure == [(0, 0)], "before clients hear of it, and before the transport takes its time"


def test_two_failures_apart_do_not_end_the_loop() -> None:
    def fail(number: int, batch: Batch) -> None:
        if number in (1, 3):
            raise RunnerError("bad", [])

    with Loop(fail) as loop:
        for reason in ("error", "length", "error", "length"):
            request = loop.submit(prompt_of(3), max_tokens=1)
            assert loop.finals(1)[request.request_id].finish_reason == reason
    assert loop.error is None


def test_shutdown_aborts_what_runs_and_what_is_behind_it_in_the_queue() -> None:
    loop = Loop()
    requests = [loop.submit(prompt_of(3), max_tokens=900)]
    loop.inbox.put(Shutdown())
    requests.append(loop.submit(prompt_of(3, 1)))
    loop.thread.start()
    finals = loop.finals(2)
    loop.join()
    assert {finals[request.request_id].finish_reason for request in requests} == {"abort"}
    assert (loop.connector.closed, loop.scheduler.pool.num_used) == (1, 0)
    assert loop.told_of_failure == []


def test_transfer_events_reach_the_connector() -> None:
    p = FakeEngine(network=pair()[2], role="prefill", name="p3")
    inbox: SimpleQueue[Inbox] = SimpleQueue()
    core = EngineCore(p.scheduler, p.runner, p.connector, inbox, lambda outputs: None)
    request = p.submit(prompt_of(9), max_tokens=1, params=KVTransferParams.for_prefill())
    p.run()
    inbox.put(LeaseReleased(request.request_id))
    core.take_in()
    p.check_idle()

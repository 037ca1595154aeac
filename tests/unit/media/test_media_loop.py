"""The engine's loop where encodings are exchanged: it wakes for them, hears of them, and lets go of them."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from connectors.base import NullConnector
from connectors.fake import FakeClock, Fault
from connectors.transport import LeaseReleased
from engine.batch import Batch, StepResult
from engine.core import EngineCore
from engine.messages import EncoderTransfer, Inbox, Output, Shutdown, Submit
from engine.runner import RunnerError
from tests.media_engines import LEASE_SECONDS, WAIT_SECONDS, EncodeEngine, pair
from tests.media_runner import encode, picture_request


class Inboxed(SimpleQueue):
    """An inbox that lets the time of a wait pass on the test's clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.waits: list[float] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Inbox:
        assert timeout is not None, "every wait has a timeout"
        self.waits.append(timeout)
        self.clock.now += timeout
        raise Empty


class Encodes:
    """The runner of an engine that only encodes."""

    def __init__(self, engine: EncodeEngine) -> None:
        self.engine = engine
        self.broken = 0

    def run(self, batch: Batch) -> StepResult:
        if self.broken:
            self.broken -= 1
            raise RunnerError("no memory", ())
        encode(batch, self.engine.encoder.memory, self.engine.encoded)
        return StepResult([])


class Loop:
    def __init__(self, engine: EncodeEngine) -> None:
        self.engine = engine
        self.runner = Encodes(engine)
        self.inbox = Inboxed(engine.network.clock)
        self.outputs: list[Output] = []
        self.core = EngineCore(
            engine.scheduler,
            self.runner,
            NullConnector(),
            self.inbox,
            self.outputs.extend,
            clock=engine.network.clock,
        )


def test_an_encoder_answers_and_wakes_when_an_announcement_runs_out() -> None:
    e, _, _ = pair()
    loop = Loop(e)
    loop.inbox.put(Submit(picture_request("a", 3)))
    loop.core.step()
    assert [output.finish_reason for output in loop.outputs] == ["stop"]
    loop.core.step()
    assert loop.inbox.waits == [LEASE_SECONDS]
    loop.core.step()
    assert e.encoder.leases.num_ended == {"expired": 1}


def test_a_reader_that_is_done_is_heard() -> None:
    e, _, _ = pair()
    loop = Loop(e)
    params = e.announce("a")
    loop.inbox.put(EncoderTransfer(LeaseReleased(str(params.items["a"].lease_id))))
    loop.core.take_in()
    assert e.encoder.leases.num_ended == {"released": 1}
    e.check_idle()


def test_a_step_that_fails_ends_the_requests_it_encoded_for() -> None:
    e, _, _ = pair()
    loop = Loop(e)
    loop.runner.broken = 1
    loop.inbox.put(Submit(picture_request("a", 3)))
    loop.core.step()
    loop.inbox.put(Submit(picture_request("a", 3)))
    loop.core.step()
    assert [output.finish_reason for output in loop.outputs] == ["error", "stop"]
    assert loop.outputs[0].error_status == 500


def test_an_idle_loop_wakes_when_a_request_has_waited_long_enough() -> None:
    e, p, network = pair()
    network.faults = lambda pull: Fault(stalls=WAIT_SECONDS * 2, before_claim=WAIT_SECONDS * 2)
    inbox = Inboxed(network.clock)
    core = EngineCore(p.scheduler, p.runner, NullConnector(), inbox, lambda outputs: None, clock=network.clock)
    p.ask(3, "a", 1, ec_params=e.announce("a"))
    core.step()
    assert inbox.waits == [WAIT_SECONDS]
    core.step()
    assert p.runner.encoded == {"a": 1}


def test_the_end_of_the_loop_closes_the_transport_of_encodings() -> None:
    e, _, network = pair()
    loop = Loop(e)
    loop.inbox.put(Submit(picture_request("a", 3)))
    loop.inbox.put(Shutdown())
    loop.core.run()
    assert [output.finish_reason for output in loop.outputs] == ["stop"]
    assert ("e.test", 8200) not in network.endpoints


def test_announcements_to_requests_that_end_with_the_engine_are_given_back() -> None:
    e, p, network = pair()
    network.faults = lambda pull: Fault(before_claim=5.0)
    inbox = Inboxed(network.clock)
    core = EngineCore(p.scheduler, p.runner, NullConnector(), inbox, lambda outputs: None, clock=network.clock)
    request = picture_request(3, "a", "b", 1, ec_params=e.announce("a"))
    inbox.put(Submit(request))
    core.take_in()
    inbox.put(Shutdown())
    core.run()
    assert request.status.finished
    assert p.encoder.connector._announced == {}

"""A client leaves: in every state a request can be in, at either engine. Nothing of it stays, and nobody beside it
notices."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from connectors.fake import FakeNetwork, Fault
from connectors.wire.transfer import KVTransferParams
from engine.messages import Stop
from engine.request import Request, RequestStatus
from tests.fake_engines import LEASE_SECONDS, OFFER_SECONDS, FakeEngine, pair, settle_all
from tests.fake_runner import expected_output, prompt_of

LENGTH = 18
S = RequestStatus


@dataclass
class Scene:
    """An owner whose blocks a reader may pull for `request`, and a neighbour at the reader that is to be answered."""

    reader: FakeEngine
    owner: FakeEngine
    network: FakeNetwork
    params: KVTransferParams
    prompt: list[int]
    neighbour: Request | None = None

    def submit(self) -> Request:
        return self.reader.submit(self.prompt, max_tokens=6, params=self.params)

    def beside(self, *, max_tokens: int = 40) -> None:
        self.neighbour = self.reader.submit(prompt_of(6, 1), max_tokens=max_tokens)
        self.reader.step()


def scene(direction: str, **reader: object) -> Scene:
    """A hand-over from prefill to decode, or the offer of a turn from decode to prefill."""
    if direction == "to decode":
        p, d, network = pair(decode=reader)
        prompt = prompt_of(LENGTH)
        return Scene(d, p, network, p.prefill(prompt), prompt)
    p, d, network = pair(prefill=reader)
    first = prompt_of(LENGTH - 5)
    answer, offer = d.decode(first, KVTransferParams.for_decode_alone(), max_tokens=4)
    return Scene(p, d, network, KVTransferParams.for_prefill(offer), [*first, *answer, 7])


def waits_for_room(s: Scene) -> Request:
    hog = s.reader.submit(prompt_of(s.reader.pool.num_blocks * 4 - 8, 2), max_tokens=8)
    s.reader.step()
    request = s.submit()
    s.reader.step()
    assert (hog.status, request.status) == (S.RUNNING, S.WAITING)
    return request


def load_queued(s: Scene) -> Request:
    s.network.faults = lambda pull: Fault(before_claim=1.0)
    request = s.submit()
    s.reader.step()
    assert request.status is S.WAITING_FOR_REMOTE_KVS
    return request


def load_claimed(s: Scene) -> Request:
    s.network.faults = lambda pull: Fault(before_read=1.0)
    request = s.submit()
    s.reader.step()
    s.network.advance(0.5)
    assert s.owner.leases.num_claimed == 1
    return request


def load_read(s: Scene) -> Request:
    s.network.faults = lambda pull: Fault(before_done=1.0)
    request = s.submit()
    s.reader.step()
    s.network.advance(0.5)
    return request


def load_stalled(s: Scene) -> Request:
    s.network.faults = lambda pull: Fault(stalls=20.0)
    request = s.submit()
    s.reader.step()
    s.network.advance(0.5)
    s.reader.settle()
    assert request.status is S.WAITING
    return request


def load_failed(s: Scene) -> Request:
    s.network.faults = lambda pull: Fault(fails="transfer")
    request = s.submit()
    s.reader.step()
    s.network.advance(0.5)
    s.reader.settle()
    assert request.status is S.WAITING
    return request


def loaded(s: Scene) -> Request:
    request = s.submit()
    s.reader.step()
    s.network.advance(0.5)
    s.reader.settle()
    assert list(s.reader.scheduler.loaded) == [request]
    return request


def prefills_a_chunk(s: Scene) -> Request:
    s.reader.scheduler.max_num_batched_tokens = 5
    s.network.faults = lambda pull: Fault(fails="transfer")
    request = load_failed(s)
    s.reader.step()
    assert request.status is S.RUNNING
    assert 0 < request.num_computed_tokens < request.num_prompt_tokens
    return request


def decodes(s: Scene) -> Request:
    request = loaded(s)
    for _ in range(3):
        s.reader.step()
    assert request.num_output_tokens > 1
    return request


def preempted(s: Scene) -> Request:
    request = decodes(s)
    s.reader.scheduler._preempt(s.reader.scheduler.running.pop())
    assert request.status is S.PREEMPTED
    return request


STATES: dict[str, Callable[[Scene], Request]] = {
    state.__name__: state
    for state in (
        waits_for_room,
        load_queued,
        load_claimed,
        load_read,
        load_stalled,
        load_failed,
        loaded,
        prefills_a_chunk,
        decodes,
        preempted,
    )
}


@pytest.mark.parametrize("direction", ["to decode", "to prefill"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("during_step", [False, True])
def test_whatever_an_aborted_request_was_at_nothing_stays(state: str, direction: str, during_step: bool) -> None:
    s = scene(direction, num_blocks=16)
    if state != "waits_for_room":
        s.beside()
    request = STATES[state](s)
    s.network.faults = lambda pull: Fault()
    if during_step:
        s.reader.step(during=lambda: s.reader.abort(request))
    else:
        s.reader.abort(request)
        s.reader.check()
    s.reader.collect()
    assert s.reader.final(request).finish_reason == "abort"
    assert request.request_id not in s.reader.scheduler.requests
    s.reader.run()
    if s.neighbour is not None:
        assert s.reader.answer(s.neighbour) == expected_output(prompt_of(6, 1), max_tokens=40)
    # A stalled read ends when its peer goes on; every lease is over long before it would have run out by itself.
    settle_all(s.reader, s.owner, seconds=21 if state == "load_stalled" else LEASE_SECONDS - 2)
    for engine in (s.reader, s.owner):
        engine.check_idle()
        assert engine.connector.owner.num_released_unknown == 0
    assert not s.reader.connector.reader.stalled
    # What was claimed, and not read to its end, is given back by nobody but time.
    expired = s.owner.leases.num_ended["expired"]
    assert expired == (state in ("load_stalled", "load_failed", "prefills_a_chunk"))


@pytest.mark.parametrize("engine", ["prefill", "decode"])
def test_aborting_what_has_ended_leaves_its_lease_to_the_reader(engine: str) -> None:
    s = scene("to decode" if engine == "prefill" else "to prefill")
    s.owner.scheduler.stop(Stop(s.params.remote_request_id or "", aborted=True))
    s.submit()
    s.reader.run()
    assert s.reader.connector.reader.num_pulls_done == 1
    settle_all(s.reader, s.owner, seconds=1)
    s.owner.check_idle()


@pytest.mark.parametrize("num_blocks", [5, 6, 8, 11])
@pytest.mark.parametrize("stalls", [None, 30.0])
def test_requests_that_fit_alone_but_not_together_are_all_answered(num_blocks: int, stalls: float | None) -> None:
    """Some of them hold blocks while they wait for a peer, which may hang for long: the others find room in the end."""
    p, d, network = pair(decode={"num_blocks": num_blocks, "max_num_seqs": 4})
    prompts = [prompt_of(14, seed) for seed in range(6)]
    params = [p.prefill(prompt) if seed % 2 else None for seed, prompt in enumerate(prompts)]
    network.faults = lambda pull: Fault(before_read=0.5, stalls=stalls if pull.first_block == 0 else None)
    requests = [d.submit(prompt, max_tokens=5, params=each) for prompt, each in zip(prompts, params, strict=True)]
    never = d.submit(prompt_of(num_blocks * 4 + 1), max_tokens=1)
    d.collect()
    assert (d.final(never).finish_reason, d.final(never).error_status) == ("error", 400)
    d.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert d.answer(request) == expected_output(prompt, max_tokens=5)
    settle_all(p, d, seconds=40)
    d.check_idle()
    p.check_empty()


def test_no_object_outlives_its_request() -> None:
    """Turns of every kind, with faults and aborts; afterwards there are as many of our objects as before."""
    p, d, network = pair(decode={"num_blocks": 24}, prefill={"num_blocks": 24})
    rng = random.Random(4)

    def turns(count: int) -> None:
        for number in range(count):
            prompt = prompt_of(rng.randrange(1, 30), number % 7)
            network.faults = lambda pull: Fault(
                before_read=rng.choice([0.0, 1.0, 5.0]),
                fails=rng.choice([None, None, "transfer", "disconnected"]),
                stalls=rng.choice([None, None, None, 3.0]),
            )
            held = p.prefill(prompt)
            request = d.submit(prompt, max_tokens=5, params=held)
            for _ in range(rng.randrange(6)):
                d.step()
            if rng.random() < 0.4:
                d.abort(request)
            d.run()
            d.collect()
            p.step()
            offer = d.final(request).kv_transfer_params
            if offer is not None and rng.random() < 0.5:
                p.submit([*prompt, 7], max_tokens=1, params=KVTransferParams.for_prefill(offer))
                p.run()

    def num_objects() -> Counter[str]:
        settle_all(p, d, seconds=OFFER_SECONDS + 1)
        for engine in (p, d):
            engine.check_empty()
            engine.leases._ended.clear()  # the last few thousand are remembered
            for kept in (engine.finals, engine.tokens, engine.logprobs, engine.runner.num_computed):
                kept.clear()
            for told in (
                engine.runner.batches,
                *(getattr(engine.transport, n) for n in ("pulls", "releases", "renewals")),
            ):
                told.clear()
        gc.collect()
        kinds = (type(one) for one in gc.get_objects())
        return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(("engine", "connectors")))

    turns(30)
    before = num_objects()
    turns(120)
    assert num_objects() == before

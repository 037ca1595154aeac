"""Whatever clients, peers and the network do: no wrong KV, nothing lost, nothing left behind.

A prefill and a decode engine with tiny pools and budgets, joined by a network that delays, fails, loses messages and
lets leases run out, under arbitrary traffic. `FakeEngine.check` holds after every step, `FakeRunner` refuses to read KV
that is not the request's own, and at the end every answer is that of a lone cold engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from connectors.fake import FakeNetwork, Fault
from connectors.kv import KVConnector
from connectors.wire.transfer import KVTransferParams, WireError
from engine.messages import Stop
from engine.request import Request, RequestStatus
from tests.fake_engines import CLAIM_SECONDS, FORGERIES, LEASE_SECONDS, OF_ITS_OWN_PROMPT, FakeEngine, forge
from tests.fake_runner import prompt_of

FAMILIES = [prompt_of(24, seed) for seed in (11, 12)]
PROMPTS = st.builds(
    lambda family, length, suffix: [*FAMILIES[family][:length], *suffix],
    st.integers(0, 1),
    st.integers(1, 24),
    st.lists(st.integers(2, 5), max_size=3),
)
SECONDS = st.sampled_from([0.0, 0.0, 0.3, 0.3, 1.0, CLAIM_SECONDS - 0.1, CLAIM_SECONDS, LEASE_SECONDS + 1])
FAULTS = st.just(Fault()) | st.builds(
    Fault,
    before_claim=SECONDS,
    before_read=SECONDS,
    before_done=SECONDS,
    before_notify=SECONDS,
    fails=st.sampled_from([None, None, None, "transfer", "timeout", "disconnected"]),
    stalls=st.sampled_from([None, None, None, 3.0, 30.0]),
    notify_lost=st.booleans(),
)
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 14),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset(range(2, 12))]),
    }
)


@cache
def lone_answer(prompt: tuple[int, ...], sampling: tuple[tuple[str, object], ...]) -> list[int]:
    """What one cold engine with room enough and nothing else to do answers."""
    engine = FakeEngine()
    request = engine.submit(prompt, **dict(sampling))
    engine.run()
    return engine.answer(request)


class Handoffs(RuleBasedStateMachine):
    @initialize(
        blocks=st.tuples(st.integers(8, 20), st.integers(8, 20)),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 24),
        policy=st.sampled_from(["recompute", "fail"]),
        prefix_caching=st.booleans(),
    )
    def start(self, blocks: tuple[int, int], max_num_seqs: int, budget: int, policy: str, prefix_caching: bool) -> None:
        self.network = FakeNetwork()
        self.policy = policy
        shared = {
            "network": self.network,
            "policy": policy,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "enable_prefix_caching": prefix_caching,
        }
        self.p = FakeEngine(name="p", role="prefill", num_blocks=blocks[0], **shared)
        self.d = FakeEngine(name="d", role="decode", num_blocks=blocks[1], **shared)
        self.requests: list[tuple[FakeEngine, Request, dict[str, object]]] = []
        self.legs: list[Request] = []
        """Prefill legs whose answer has not been used yet."""

    def submit(self, engine: FakeEngine, prompt: list[int], sampling: dict[str, object], **options) -> Request:
        request = engine.submit(prompt, **sampling, **options)
        self.requests.append((engine, request, sampling))
        return request

    @rule(prompt=PROMPTS, sampling=SAMPLING, at_decode=st.booleans())
    def local_request(self, prompt: list[int], sampling: dict[str, object], at_decode: bool) -> None:
        self.submit(self.d if at_decode else self.p, prompt, sampling)

    @rule(prompt=PROMPTS, max_tokens=st.sampled_from([1, 1, 1, 3]))
    def prefill_leg(self, prompt: list[int], max_tokens: int) -> None:
        sampling = {"max_tokens": max_tokens, "ignore_eos": True, "stop_token_ids": frozenset()}
        self.legs.append(self.submit(self.p, prompt, sampling, params=KVTransferParams.for_prefill()))

    @rule(prompt=PROMPTS, sampling=SAMPLING, strip=st.booleans())
    def turn(self, prompt: list[int], sampling: dict[str, object], strip: bool) -> None:
        """Both legs of a turn, the second as soon as the first has been answered, if that is soon."""
        self.prefill_leg(prompt, 1)
        leg = self.legs[-1]
        for _ in range(8):
            if leg.request_id in self.p.finals:
                self.legs.remove(leg)
                self.hand_over(leg, sampling, strip=strip)
                return
            self.p.step()

    @precondition(lambda self: any(leg.request_id in self.p.finals for leg in self.legs))
    @rule(data=st.data(), sampling=SAMPLING, suffix=st.lists(st.integers(2, 9), max_size=2), strip=st.booleans())
    def decode_leg(self, data: st.DataObject, sampling: dict[str, object], suffix: list[int], strip: bool) -> None:
        """A decode leg that may come late, for an edited prompt, or twice."""
        leg = data.draw(st.sampled_from([leg for leg in self.legs if leg.request_id in self.p.finals]))
        if data.draw(st.integers(0, 5)):
            self.legs.remove(leg)
        self.hand_over(leg, sampling, suffix, strip=strip)

    @precondition(lambda self: len([leg for leg in self.legs if leg.request_id in self.p.finals]) > 1)
    @rule(data=st.data(), sampling=SAMPLING, forgery=st.sampled_from(FORGERIES), suffix=st.lists(st.integers(2, 9)))
    def forged_leg(self, data: st.DataObject, sampling: dict[str, object], forgery: str, suffix: list[int]) -> None:
        """A client of the decode engine's own port, with params made of those for two prompts."""
        legs = [leg for leg in self.legs if leg.request_id in self.p.finals]
        leg, other = data.draw(st.permutations(legs))[:2]
        params, others = (self.p.final(each).kv_transfer_params for each in (leg, other))
        if params is None or others is None or not params.remote_num_tokens or not others.remote_num_tokens:
            return
        forged = forge(forgery, params, others)
        with contextlib.suppress(WireError):
            self.d.connector.check(forged)
            victim = leg if forgery in OF_ITS_OWN_PROMPT else other
            self.submit(self.d, [*victim.prompt_token_ids, *suffix], sampling, params=forged)

    def hand_over(self, leg: Request, sampling: dict[str, object], suffix: Sequence[int] = (), *, strip: bool) -> None:
        params = self.p.final(leg).kv_transfer_params
        prompt = leg.prompt_token_ids
        if params is not None and params.remote_block_ids != [[]]:
            params = params.for_decode()
            if strip and params.remote_num_tokens == leg.num_prompt_tokens:
                params = params.without("remote_block_hashes")  # a router that keeps nothing but vLLM's keys
            else:
                prompt = [*prompt, *suffix]
        self.submit(self.d, prompt, sampling, params=params)

    @rule(fault=FAULTS, drop=st.booleans(), delay=SECONDS)
    def weather(self, fault: Fault, drop: bool, delay: float) -> None:
        self.network.faults = lambda pull: fault
        self.network.drop_messages = drop
        self.network.message_delay = delay

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.network.advance(seconds)

    @rule(at_decode=st.booleans(), steps=st.integers(1, 8))
    def steps(self, at_decode: bool, steps: int) -> None:
        for _ in range(steps):
            (self.d if at_decode else self.p).step()
            self.network.advance()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_output_tokens=st.none() | st.integers(0, 8), during_step=st.booleans())
    def stop(self, data: st.DataObject, num_output_tokens: int | None, during_step: bool) -> None:
        """A client leaves, or a stop string ends its answer, in whatever state the request is."""
        engine, request, _ = data.draw(st.sampled_from(self.requests))
        if num_output_tokens is not None:
            num_output_tokens = min(num_output_tokens, request.num_output_tokens)
        message = Stop(request.request_id, aborted=num_output_tokens is None, num_output_tokens=num_output_tokens)
        if during_step:
            engine.step(during=lambda: engine.scheduler.stop(message))
        else:
            engine.scheduler.stop(message)
            engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "p"):
            return
        self.network.drop_messages = False
        for _ in range(5_000):
            stepped = [self.p.step(), self.d.step()]
            busy = any(stepped)
            if not busy and not self.unfinished():
                break
            self.network.advance(0.0 if busy else 0.5)
        assert not self.unfinished(), "stuck"
        # Late messages, and the leases that nobody read.
        for _ in range(60):
            self.network.advance(1.0)
            self.p.step()
            self.d.step()
        self.p.check_idle()
        self.d.check_idle()
        assert self.network.num_under_way == 0
        self.check_answers()
        self.check_counts()

    def unfinished(self) -> bool:
        schedulers = self.p.scheduler, self.d.scheduler
        return any(scheduler.requests or scheduler.loading for scheduler in schedulers)

    def check_answers(self) -> None:
        for engine, request, sampling in self.requests:
            final, got = engine.final(request), engine.answer(request)
            expected = lone_answer(tuple(request.prompt_token_ids), tuple(sampling.items()))
            assert got == expected[: len(got)], "the answer differs from a cold engine's"
            if final.finish_reason == "error":
                known = ["do not fit", *(["could not be loaded"] if self.policy == "fail" else [])]
                assert any(message in (final.error or "") for message in known)
            elif final.finish_reason == "length" or (final.finish_reason == "stop" and final.token_ids):
                assert got == expected, "the answer is cut short"
            assert request.status is RequestStatus(final.finish_reason)

    def check_counts(self) -> None:
        p, d = self.p.connector, self.d.connector
        assert isinstance(p, KVConnector)
        assert isinstance(d, KVConnector)
        assert p.num_leases_held == p.num_leases_released + p.num_leases_expired
        assert d.num_pulls_done + sum(d.num_pulls_failed.values()) == len(self.d.transport.pulls)
        with_blocks = [
            request
            for engine, request, _ in self.requests
            if engine is self.d and request.kv_transfer_params and request.kv_transfer_params.remote_blocks()
        ]
        assert len(self.d.transport.pulls) + sum(d.num_not_pulled.values()) == len(with_blocks)


Handoffs.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestHandoffs = Handoffs.TestCase

"""Whatever clients, peers and the network do: no wrong KV, nothing lost, nothing left behind.

A prefill and a decode engine with tiny pools and budgets, joined by a network that delays, fails, loses messages and
lets leases run out, under arbitrary traffic: single requests, and conversations whose history is edited and whose KV
goes from one engine to the other and back. `FakeEngine.check` holds after every step, `FakeRunner` refuses to read KV
that is not the request's own, and at the end every answer is that of a lone cold engine.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from connectors.fake import FakeNetwork, Fault
from connectors.kv import KVConnector
from connectors.wire.transfer import KVTransferParams, WireError
from engine.messages import Stop
from engine.request import Request, RequestStatus
from tests.fake_engines import (
    CLAIM_SECONDS,
    FORGERIES,
    LEASE_SECONDS,
    OF_ITS_OWN_PROMPT,
    OFFER_SECONDS,
    FakeEngine,
    forge,
)
from tests.fake_runner import BLOCK_SIZE, prompt_of

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
EDITS = st.sampled_from(["none", "none", "none", "change", "drop", "insert", "truncate", "regenerate", "start anew"])
NUM_CONVERSATIONS = 3
MAX_HISTORY = 36


@dataclass(eq=False)
class Conversation:
    """What a router knows of one: its tokens, and where the KV of the last turn lies."""

    history: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """Of the last turn."""
    offer: KVTransferParams | None = None
    computed: list[int] = field(default_factory=list)
    """The tokens that the decode engine offers the KV of."""
    prefill: Request | None = None
    decode: Request | None = None
    """The leg of the turn that is under way."""

    def edited(self, edit: str, at: int, suffix: list[int]) -> list[int]:
        history = self.history if len(self.history) < MAX_HISTORY else self.history[:12]
        at = at % len(history) if history else 0
        match edit:
            case "change":
                history = [*history[:at], 7, *history[at + 1 :]]
            case "drop":
                history = [*history[:at], *history[at + 3 :]]
            case "insert":
                history = [*history[:at], 7, *history[at:]]
            case "truncate":
                history = history[:at]
            case "regenerate":
                return self.prompt or suffix
            case "start anew":
                history = []
        return [*history, *suffix]


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two sequences start with."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


SEEN: Counter[str] = Counter()
"""What came about in all the examples together."""


@cache
def lone_answer(prompt: tuple[int, ...], sampling: tuple[tuple[str, object], ...]) -> list[int]:
    """What one cold engine with room enough and nothing else to do answers."""
    engine = FakeEngine()
    request = engine.submit(prompt, **dict(sampling))
    engine.run()
    return engine.answer(request)


class Pair(RuleBasedStateMachine):
    """A prefill and a decode engine, what happens to any of their requests, and what must hold in the end."""

    @initialize(
        blocks=st.tuples(st.integers(8, 20), st.integers(8, 20)),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 24),
        policy=st.sampled_from(["recompute", "fail"]),
        prefix_caching=st.booleans(),
        threshold=st.sampled_from([0, 1, 5, 12]),
        offsets=st.tuples(*[st.sampled_from([0.0, -1000.0, 1000.0])] * 2),
    )
    def start(
        self,
        blocks: tuple[int, int],
        max_num_seqs: int,
        budget: int,
        policy: str,
        prefix_caching: bool,
        threshold: int,
        offsets: tuple[float, float],
    ) -> None:
        self.network = FakeNetwork()
        self.policy = policy
        shared = {
            "network": self.network,
            "policy": policy,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "enable_prefix_caching": prefix_caching,
            "recompute_threshold": threshold,
        }
        self.p = FakeEngine(name="p", role="prefill", num_blocks=blocks[0], clock_offset=offsets[0], **shared)
        self.d = FakeEngine(name="d", role="decode", num_blocks=blocks[1], clock_offset=offsets[1], **shared)
        self.requests: list[tuple[FakeEngine, Request, dict[str, object]]] = []

    def submit(self, engine: FakeEngine, prompt: list[int], sampling: dict[str, object], **options) -> Request:
        request = engine.submit(prompt, **sampling, **options)
        self.requests.append((engine, request, sampling))
        return request

    @rule(prompt=PROMPTS, sampling=SAMPLING, at_decode=st.booleans())
    def local_request(self, prompt: list[int], sampling: dict[str, object], at_decode: bool) -> None:
        self.submit(self.d if at_decode else self.p, prompt, sampling)

    @rule(fault=FAULTS, drop=st.booleans(), delay=SECONDS, dead=st.sampled_from(["", "", "", "", "p", "d"]))
    def weather(self, fault: Fault, drop: bool, delay: float, dead: str) -> None:
        self.network.faults = lambda pull: fault
        self.network.drop_messages = drop
        self.network.message_delay = delay
        self.network.unreachable = {dead}

    @rule(seconds=SECONDS | st.just(OFFER_SECONDS))
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
        self.network.unreachable = set()
        for _ in range(5_000):
            stepped = [self.p.step(), self.d.step()]
            busy = any(stepped)
            if not busy and not self.unfinished():
                break
            self.network.advance(0.0 if busy else 0.5)
        assert not self.unfinished(), "stuck"
        # Late messages, and the leases that nobody read.
        self.let_pass(60.0)
        self.p.check_empty()
        self.d.check_idle()
        self.let_pass(OFFER_SECONDS)
        self.d.check_empty()
        assert self.network.num_under_way == 0
        self.check_answers()
        self.check_counts()

    def let_pass(self, seconds: float) -> None:
        """As for engines that have nothing to do: they sleep until something comes in, or is due."""
        end = self.network.clock.now + seconds
        while (left := end - self.network.clock.now) > 0:
            self.network.advance(min(left, self.until_due()))
            self.p.step()
            self.d.step()

    def until_due(self) -> float:
        """Seconds."""
        if self.network.num_under_way:
            return 1.0
        wakeups = [(engine, engine.connector.next_wakeup()) for engine in (self.p, self.d)]
        return max(0.1, min((at - engine.clock() for engine, at in wakeups if at is not None), default=math.inf))

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
        for engine in (self.p, self.d):
            assert isinstance(engine.connector, KVConnector)
            reader, num_pulls = engine.connector.reader, len(engine.transport.pulls)
            assert reader.num_pulls_done + sum(reader.num_pulls_failed.values()) == num_pulls
            remotes = [
                (remote, request)
                for at, request, _ in self.requests
                if at is engine and request.kv_transfer_params
                if (remote := engine.connector.check(request.kv_transfer_params)) is not None
            ]
            assert num_pulls + sum(reader.num_not_pulled.values()) == len(remotes)
            num_offered = sum(min(remote.num_tokens, request.num_prompt_tokens) for remote, request in remotes)
            pulled, not_pulled = reader.num_tokens_pulled.values(), reader.num_tokens_not_pulled.values()
            assert sum(pulled) + sum(not_pulled) == num_offered
            SEEN.update({f"{source} pulled": tokens for source, tokens in reader.num_tokens_pulled.items()})
            SEEN.update(
                {f"{source} {reason}": tokens for (source, reason), tokens in reader.num_tokens_not_pulled.items()}
            )
            SEEN.update({f"ended {fate}": leases for fate, leases in engine.leases.num_ended.items()})
            SEEN.update({f"refused {reason}": claims for reason, claims in engine.leases.num_claims_refused.items()})
            SEEN.update({f"failed {reason}": pulls for reason, pulls in reader.num_pulls_failed.items()})


class Handoffs(Pair):
    """Single turns, as routers and others may play them."""

    def __init__(self) -> None:
        super().__init__()
        self.legs: list[Request] = []
        """Prefill legs whose answer has not been used yet."""

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


class Conversations(Pair):
    """Turns that build on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conversations = [Conversation() for _ in range(NUM_CONVERSATIONS)]
        self.offered: list[tuple[Request, list[int]]] = []
        """Requests with an offer, and the tokens it is for."""

    @rule(
        index=st.integers(0, NUM_CONVERSATIONS - 1),
        edit=EDITS,
        at=st.integers(0, 99),
        suffix=st.lists(st.integers(2, 9), min_size=1, max_size=6),
        router=st.sampled_from(["tells hashes", "compares tokens", "compares nothing"]),
        alone=st.sampled_from([False, False, False, True]),
        steps=st.sampled_from([0, 5, 30]),
        sampling=SAMPLING,
    )
    def talk(
        self,
        index: int,
        edit: str,
        at: int,
        suffix: list[int],
        router: str,
        alone: bool,
        steps: int,
        sampling: dict[str, object],
    ) -> None:
        """Go on with a conversation: each leg of a turn after the other, as far as some steps take it."""
        conversation = self.conversations[index]
        for _ in range(3):
            if conversation.decode is not None:
                if not self.ended(self.d, conversation.decode, steps):
                    return
                self.remember(conversation)
            elif conversation.prefill is not None:
                if not self.ended(self.p, conversation.prefill, steps):
                    return
                self.second_leg(conversation, sampling)
            else:
                self.first_leg(conversation, conversation.edited(edit, at, suffix), router, alone, sampling)

    def ended(self, engine: FakeEngine, request: Request, steps: int) -> bool:
        for _ in range(steps):
            if request.request_id in engine.finals:
                break
            engine.step()
            self.network.advance()
        return request.request_id in engine.finals

    def first_leg(
        self, conversation: Conversation, prompt: list[int], router: str, alone: bool, sampling: dict[str, object]
    ) -> None:
        conversation.prompt = prompt
        offer = conversation.offer
        if alone:
            conversation.decode = self.submit(self.d, prompt, sampling, params=KVTransferParams.for_decode_alone())
            return
        if offer is not None and router == "compares tokens":
            offer = offer.trimmed(num_common(prompt, conversation.computed))
        if offer is not None and router != "tells hashes":
            offer = offer.without("remote_block_hashes")
        sampling = {"max_tokens": 1, "ignore_eos": True, "stop_token_ids": frozenset()}
        request = self.submit(self.p, prompt, sampling, params=KVTransferParams.for_prefill(offer))
        conversation.prefill = request
        if offer is not None:
            self.offered.append((request, conversation.computed[: offer.remote_num_tokens]))

    def second_leg(self, conversation: Conversation, sampling: dict[str, object]) -> None:
        leg, conversation.prefill = conversation.prefill, None
        assert leg is not None
        params = self.p.final(leg).kv_transfer_params
        if params is None or params.remote_block_ids == [[]]:
            params = KVTransferParams.for_decode_alone()
        else:
            params = params.for_decode()
        conversation.decode = self.submit(self.d, conversation.prompt, sampling, params=params)

    def remember(self, conversation: Conversation) -> None:
        """Failed turns leave the record of the turn before, which may be used up."""
        leg, conversation.decode = conversation.decode, None
        assert leg is not None
        offer = self.d.final(leg).kv_transfer_params
        if offer is not None:
            conversation.history = [*conversation.prompt, *self.d.answer(leg)]
            conversation.computed = conversation.history[: offer.remote_num_tokens]
            conversation.offer = offer

    def check_counts(self) -> None:
        super().check_counts()
        for request, computed in self.offered:
            if request.num_external_tokens:
                SEEN["partial block pulled"] += (
                    request.num_cached_tokens + request.num_external_tokens
                ) % BLOCK_SIZE > 0
                SEEN["pulled, then preempted"] += request.num_preemptions > 0
                common = num_common(request.prompt_token_ids, computed)
                assert request.num_cached_tokens + request.num_external_tokens <= common


Handoffs.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
Conversations.TestCase.settings = settings(Handoffs.TestCase.settings, max_examples=200)
TestHandoffs = Handoffs.TestCase
TestConversations = Conversations.TestCase


def test_the_traffic_was_varied_enough() -> None:
    if not SEEN:
        pytest.skip("only after the tests above")
    # What is rarer than these depends on the day; it has tests of its own.
    expected = {
        *(f"prefill {reason}" for reason in ("pulled", "failed", "cached")),
        *(f"decode {reason}" for reason in ("pulled", "hashes", "failed", "cached", "below_threshold")),
        *(f"ended {fate}" for fate in ("released", "expired", "revoked")),
        *(f"refused {reason}" for reason in ("expired", "revoked")),
        *(f"failed {reason}" for reason in ("handshake", "claim", "timeout")),
        "partial block pulled",
    }
    missing = expected - set(+SEEN)
    assert not missing

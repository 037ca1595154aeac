"""What a step tells beside its tokens: log probabilities, failures, and grammars that have to follow."""

from __future__ import annotations

import pytest

from connectors.wire.transfer import KVTransferParams
from engine.request import RequestStatus
from tests.fake_engines import FakeEngine, pair, settle_all
from tests.fake_runner import BLOCK_SIZE, EOS, expected_output, logprobs_of, prompt_ending_in, prompt_of


class ScriptedMatcher:
    """Takes any token, until it has taken `patience` of them."""

    def __init__(self, patience: int = 1000) -> None:
        self.taken: list[int] = []
        self.failure: str | None = None
        self.may_end = True
        self._patience = patience

    def bitmask(self) -> bytes:
        raise AssertionError("the scheduler has no use for it")

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)
        if len(self.taken) >= self._patience:
            self.failure = "too much"


def told_of(prompt: list[int]) -> list[object]:
    return [None, *map(logprobs_of, prompt[1:])]


def test_logprobs_go_out_with_their_tokens_the_last_one_included() -> None:
    engine = FakeEngine()
    asking = engine.submit(prompt_of(9), max_tokens=5, logprobs=0)
    plain = engine.submit(prompt_of(9, 1), max_tokens=5)
    engine.run()
    assert engine.logprobs[asking.request_id] == [logprobs_of(token) for token in engine.answer(asking)]
    assert engine.logprobs[plain.request_id] == []
    assert plain.request_id not in engine.prompt_logprobs


@pytest.mark.parametrize("budget", [64, 5, 4, 1])
@pytest.mark.parametrize("length", [1, 2, 4, 9, 16])
def test_a_prompt_is_told_about_whole_and_once(budget: int, length: int) -> None:
    engine = FakeEngine(max_num_batched_tokens=budget)
    request = engine.submit(prompt_of(length), max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert engine.prompt_logprobs[request.request_id] == told_of(prompt_of(length))
    assert engine.answer(request) == expected_output(prompt_of(length), max_tokens=1)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6])
def test_prompt_logprobs_are_whole_after_a_preemption_at_any_time(num_steps: int) -> None:
    """Of four steps for the prompt and two more: before the last of the prompt they are collected anew."""
    engine = FakeEngine(max_num_batched_tokens=4)
    prompt = prompt_of(15)
    request = engine.submit(prompt, max_tokens=6, prompt_logprobs=0, logprobs=0)
    for _ in range(num_steps):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running.pop())
    engine.run()
    assert engine.prompt_logprobs[request.request_id] == told_of(prompt)
    assert engine.answer(request) == expected_output(prompt, max_tokens=6)
    assert len(engine.logprobs[request.request_id]) == 6
    if num_steps < 4:
        assert engine.runner.num_computed[request.request_id] == 4 * num_steps + 15 + 5
    else:  # the prefix cache serves it, once the prompt has been told about
        assert engine.runner.num_computed[request.request_id] < 15 + 5 + 4


def test_prompt_logprobs_need_the_prompt_computed_not_found() -> None:
    engine = FakeEngine()
    prompt = prompt_of(20)
    engine.submit(prompt)
    engine.run()
    queries = engine.scheduler.tables.num_prefix_queries
    request = engine.submit(prompt, max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert engine.runner.num_computed[request.request_id] == 20
    assert engine.final(request).num_cached_tokens == 0
    assert engine.scheduler.tables.num_prefix_queries == queries
    later = engine.submit(prompt, max_tokens=1)
    engine.run()
    assert engine.final(later).num_cached_tokens == 16


def test_with_prompt_logprobs_a_decode_engine_computes_all_and_lets_go_of_the_lease() -> None:
    p, d, _ = pair()
    prompt = prompt_of(3 * BLOCK_SIZE + 1)
    params = p.prefill(prompt)
    assert p.leases.num_pinned_blocks
    request = d.submit(prompt, params=params, prompt_logprobs=0)
    d.run()
    assert d.answer(request) == expected_output(prompt)
    assert d.prompt_logprobs[request.request_id] == told_of(prompt)
    assert d.final(request).num_external_tokens == 0
    assert d.connector.reader.num_pulls_done == 0
    settle_all(p, d, seconds=1)
    assert p.leases.num_pinned_blocks == 0, "its owner was told, not left to wait for the lease's end"
    p.check_idle()


def test_with_prompt_logprobs_a_prefill_engine_computes_all_of_what_is_on_offer() -> None:
    p, d, _ = pair()
    prompt = prompt_of(3 * BLOCK_SIZE)
    answer, offer = d.decode(prompt, p.prefill(prompt))
    longer = [*prompt, *answer, *prompt_of(5, 1)]
    p.prefill(longer, offer=offer, prompt_logprobs=0)
    assert p.runner.num_computed[max(p.runner.num_computed)] == len(longer)
    assert p.connector.reader.num_pulls_done == 0


def test_with_prompt_logprobs_nobody_is_sent_elsewhere_for_a_cache_that_is_cold() -> None:
    engine = FakeEngine()
    params = KVTransferParams.for_decode_alone(max_prefill_tokens=2)
    asking = engine.submit(prompt_of(20), params=params, prompt_logprobs=0)
    plain = engine.submit(prompt_of(20), params=params)
    engine.run()
    assert engine.final(plain).error_status == 409
    assert engine.answer(asking) == expected_output(prompt_of(20))


def test_a_failure_of_one_request_is_its_own() -> None:
    engine = FakeEngine()
    stuck = engine.submit(prompt_of(9), max_tokens=5)
    fine = engine.submit(prompt_of(9, 1), max_tokens=5)
    engine.step()
    engine.runner.failures[stuck.request_id] = "nothing left"
    engine.run()
    final = engine.final(stuck)
    assert (final.finish_reason, final.error, final.error_status) == ("error", "nothing left", 400)
    assert len(engine.answer(stuck)) == 1
    assert engine.answer(fine) == expected_output(prompt_of(9, 1), max_tokens=5)
    engine.check_idle()


def test_a_matcher_takes_every_token_but_the_last() -> None:
    engine = FakeEngine()
    matcher = ScriptedMatcher()
    request = engine.submit(prompt_of(9), max_tokens=5, matcher=matcher)
    engine.step()
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running.pop())
    engine.run()
    assert matcher.taken == engine.answer(request)[:-1]


def test_a_matcher_that_fails_ends_its_request() -> None:
    engine = FakeEngine()
    request = engine.submit(prompt_of(9), max_tokens=50, matcher=ScriptedMatcher(patience=3))
    engine.run()
    final = engine.final(request)
    assert (final.finish_reason, final.error, final.error_status) == ("error", "too much", 400)
    assert len(engine.answer(request)) == 2
    engine.check_idle()


@pytest.mark.parametrize("wish", [{"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 3}])
def test_eos_ends_what_follows_a_grammar_whatever_is_wished(wish: dict[str, object]) -> None:
    engine = FakeEngine()
    request = engine.submit(prompt_ending_in(EOS), matcher=ScriptedMatcher(), **wish)
    free = engine.submit(prompt_ending_in(EOS), **wish)
    engine.run()
    assert (engine.answer(request), request.status) == ([EOS], RequestStatus.FINISHED_STOPPED)
    assert len(engine.answer(free)) > 1


def test_stop_token_where_the_grammar_may_end_ends_it_before_min_tokens() -> None:
    engine = FakeEngine()
    prompt = prompt_of(9)
    (first,) = expected_output(prompt, max_tokens=1)
    request = engine.submit(prompt, max_tokens=5, min_tokens=4, stop_token_ids=frozenset({first}))
    request.matcher = ScriptedMatcher(patience=1)
    engine.run()
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert engine.answer(request) == [first]

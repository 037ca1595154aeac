"""The scheduler alone: budget, chunks, prefix cache, preemption, stopping."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.messages import Stop
from engine.request import RequestStatus
from tests.fake_engines import FakeEngine
from tests.fake_runner import EOS, expected_output, prompt_ending_in, prompt_of


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21])
def test_one_request_is_answered_and_leaves_nothing_behind(length: int) -> None:
    engine = FakeEngine()
    prompt = prompt_of(length)
    request = engine.submit(prompt, max_tokens=9)
    engine.run()
    assert engine.answer(request) == expected_output(prompt, max_tokens=9)
    assert engine.final(request).finish_reason == "length"
    engine.check_idle()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = FakeEngine(max_num_batched_tokens=16)
    request = engine.submit(prompt_of(40), max_tokens=1)
    engine.run()
    assert [n for ((_, n),) in engine.runner.batches] == [16, 16, 8]
    assert engine.answer(request) == expected_output(prompt_of(40), max_tokens=1)


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    first = engine.submit(prompt_of(4), max_tokens=30)
    engine.step()
    second = engine.submit(prompt_of(40, 1), max_tokens=1)
    for _ in range(5):
        engine.step()
    assert engine.runner.batches[1:] == [[(first.request_id, 1), (second.request_id, 7)]] * 5


def test_no_more_than_max_num_seqs_run() -> None:
    engine = FakeEngine(max_num_seqs=2)
    requests = [engine.submit(prompt_of(5, seed), max_tokens=4) for seed in range(5)]
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 3)
    engine.run()
    for seed, request in enumerate(requests):
        assert engine.answer(request) == expected_output(prompt_of(5, seed), max_tokens=4)


def test_requests_are_admitted_in_order_of_arrival() -> None:
    engine = FakeEngine(num_blocks=10)
    engine.submit(prompt_of(20), max_tokens=8)
    engine.step()
    big = engine.submit(prompt_of(24, 1), max_tokens=1)
    small = engine.submit(prompt_of(4, 2), max_tokens=1)
    engine.step()
    assert list(engine.scheduler.waiting) == [big, small], "a small request must not overtake"


def test_a_common_prefix_is_computed_once() -> None:
    engine = FakeEngine()
    shared = prompt_of(16)
    first = engine.submit([*shared, 7], max_tokens=1)
    engine.run()
    second = engine.submit([*shared, 9, 9], max_tokens=3)
    engine.run()
    assert engine.final(first).num_cached_tokens == 0
    assert engine.final(second).num_cached_tokens == 16
    assert engine.runner.num_computed[second.request_id] == 2 + 2
    assert engine.answer(second) == expected_output([*shared, 9, 9], max_tokens=3)
    assert engine.scheduler.tables.num_prefix_hits == 16


def test_the_last_token_of_a_known_prompt_is_computed_for_its_logits() -> None:
    engine = FakeEngine()
    for _ in range(2):
        request = engine.submit(prompt_of(16), max_tokens=1)
        engine.run()
    assert engine.final(request).num_cached_tokens == 12
    assert engine.runner.num_computed[request.request_id] == 4


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = FakeEngine()
    first = engine.submit(prompt_of(10), max_tokens=12)
    engine.run()
    second = engine.submit([*prompt_of(10), *engine.answer(first), 3], max_tokens=2)
    engine.run()
    # The last sampled token was never fed back, so it has no KV: 21 computed tokens are 5 whole blocks.
    assert engine.final(second).num_cached_tokens == 20


def test_another_salt_finds_nothing() -> None:
    engine = FakeEngine()
    engine.submit(prompt_of(16), max_tokens=1)
    engine.run()
    other = engine.submit(prompt_of(16), max_tokens=1, hash_seed=b"another salt")
    engine.run()
    assert engine.final(other).num_cached_tokens == 0


def test_prefix_caching_can_be_off() -> None:
    engine = FakeEngine(enable_prefix_caching=False)
    for _ in range(2):
        request = engine.submit(prompt_of(16), max_tokens=1)
        engine.run()
    assert engine.final(request).num_cached_tokens == 0
    assert not engine.pool.cached


def test_blocks_are_named_only_after_the_step_that_filled_them() -> None:
    engine = FakeEngine()
    engine.submit(prompt_of(16), max_tokens=1)
    twin = engine.submit(prompt_of(16), max_tokens=1)
    engine.run()
    assert engine.final(twin).num_cached_tokens == 0, "both were scheduled in one step"


def test_the_youngest_is_preempted_and_computes_the_same_again() -> None:
    engine = FakeEngine(num_blocks=6)
    old = engine.submit(prompt_of(8), max_tokens=12)
    young = engine.submit(prompt_of(8, 1), max_tokens=12)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert (old.num_preemptions, young.num_preemptions > 0) == (0, True)
    assert engine.answer(old) == expected_output(prompt_of(8), max_tokens=12)
    assert engine.answer(young) == expected_output(prompt_of(8, 1), max_tokens=12)
    engine.check_idle()


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    engine = FakeEngine(num_blocks=6, max_num_seqs=2)
    engine.submit(prompt_of(8), max_tokens=12)
    young = engine.submit(prompt_of(8, 1), max_tokens=12)
    later = engine.submit(prompt_of(8, 2), max_tokens=1)
    while not young.num_preemptions:
        engine.step()
    assert list(engine.scheduler.waiting) == [young, later]
    assert young.status is RequestStatus.PREEMPTED


def test_a_prompt_larger_than_the_pool_fails_at_once() -> None:
    engine = FakeEngine(num_blocks=4)
    request = engine.submit(prompt_of(17))
    engine.collect()
    final = engine.final(request)
    assert (final.finish_reason, final.error_status) == ("error", 400)
    assert "17 tokens do not fit" in (final.error or "")


def test_a_request_that_outgrows_the_pool_fails_and_others_go_on() -> None:
    engine = FakeEngine(num_blocks=4)
    request = engine.submit(prompt_of(8), max_tokens=100)
    other = engine.submit(prompt_of(8, 1), max_tokens=2)
    engine.run()
    assert "do not fit" in (engine.final(request).error or "")
    assert engine.answer(other) == expected_output(prompt_of(8, 1), max_tokens=2)
    engine.check_idle()


@pytest.mark.parametrize(("length", "message"), [(0, "empty"), (32, "the prompt has 32 tokens")])
def test_a_prompt_that_cannot_be_served_is_the_callers_fault(length: int, message: str) -> None:
    engine = FakeEngine(max_model_len=32)
    request = engine.submit(prompt_of(length))
    engine.collect()
    assert message in (engine.final(request).error or "")
    assert engine.final(request).error_status == 400


def test_eos_ends_a_request() -> None:
    engine = FakeEngine()
    prompt = prompt_ending_in(EOS)
    request = engine.submit(prompt, ignore_eos=False, stop_token_ids=frozenset({EOS}))
    ignoring = engine.submit(prompt, ignore_eos=True)
    engine.run()
    final = engine.final(request)
    assert (engine.answer(request), final.finish_reason) == ([EOS], "stop")
    assert final.stop_token_id is None, "EOS comes before the stop tokens"
    assert len(engine.answer(ignoring)) == 4


def test_a_stop_token_ends_a_request_even_at_the_length_limit() -> None:
    engine = FakeEngine()
    prompt = prompt_ending_in(17)
    request = engine.submit(prompt, max_tokens=1, stop_token_ids=frozenset({17}))
    engine.run()
    final = engine.final(request)
    assert (final.finish_reason, final.stop_token_id) == ("stop", 17)


def test_min_tokens_holds_off_stop_tokens_but_not_the_length_limit() -> None:
    engine = FakeEngine()
    prompt = prompt_ending_in(17)
    request = engine.submit(prompt, max_tokens=3, min_tokens=2, stop_token_ids=frozenset({17}))
    engine.run()
    assert len(engine.answer(request)) > 1
    limited = engine.submit(prompt, max_tokens=1, min_tokens=5)
    engine.run()
    assert engine.final(limited).finish_reason == "length"


def test_max_model_len_ends_a_request() -> None:
    engine = FakeEngine(max_model_len=12)
    request = engine.submit(prompt_of(9), max_tokens=100)
    engine.run()
    assert (len(engine.answer(request)), engine.final(request).finish_reason) == (3, "length")


def test_a_stop_string_ends_a_request_as_stopped() -> None:
    engine = FakeEngine()
    request = engine.submit(prompt_of(5), max_tokens=50)
    for _ in range(6):
        engine.step()
    engine.scheduler.stop(Stop(request.request_id, aborted=False, num_output_tokens=3))
    engine.collect()
    assert engine.final(request).finish_reason == "stop"
    engine.check_idle()


def test_abort_in_every_state_frees_everything() -> None:
    engine = FakeEngine(num_blocks=6, max_num_seqs=2)
    running = engine.submit(prompt_of(8), max_tokens=12)
    preempted = engine.submit(prompt_of(8, 1), max_tokens=12)
    waiting = engine.submit(prompt_of(8, 2))
    while not preempted.num_preemptions:
        engine.step()
    for request in (running, preempted, waiting, waiting):
        engine.abort(request)
        engine.check()
    engine.collect()
    assert {engine.final(r).finish_reason for r in (running, preempted, waiting)} == {"abort"}
    engine.check_idle()


def test_abort_during_a_step_discards_its_tokens() -> None:
    engine = FakeEngine()
    gone = engine.submit(prompt_of(5), max_tokens=1)
    stays = engine.submit(prompt_of(5, 1), max_tokens=1)
    engine.step(during=lambda: engine.abort(gone))
    assert (engine.final(gone).finish_reason, engine.answer(gone)) == ("abort", [])
    assert engine.answer(stays) == expected_output(prompt_of(5, 1), max_tokens=1)


def test_a_stop_string_during_a_step_does_not_shift_the_others_tokens() -> None:
    engine = FakeEngine()
    stopped = engine.submit(prompt_of(5), max_tokens=9)
    other = engine.submit(prompt_of(5, 1), max_tokens=9)
    for _ in range(3):
        engine.step()
    stop = Stop(stopped.request_id, aborted=False, num_output_tokens=1)
    engine.step(during=lambda: engine.scheduler.stop(stop))
    engine.run()
    assert engine.answer(other) == expected_output(prompt_of(5, 1), max_tokens=9)


def test_scheduling_needs_no_model_server_or_transport() -> None:
    code = "import sys, engine.scheduler, connectors.kv; print(*{'torch', 'aiohttp', 'nixl_cu12'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == ""


def test_where_prompt_tokens_came_from_is_counted() -> None:
    engine = FakeEngine()
    for _ in range(2):
        engine.submit(prompt_of(10), max_tokens=3)
        engine.run()
    assert engine.scheduler.prompt_tokens_by_source == {"local_compute": 10 + 2, "local_cache_hit": 8}
    assert engine.scheduler.num_generated_tokens == 6
    assert engine.scheduler.num_finished == {"length": 2}

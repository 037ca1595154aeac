"""How a decode engine loads a prompt's KV (vLLM's remote-prefill lifecycle, in our terms)."""

from __future__ import annotations

import pytest

from connectors.fake import Fault
from connectors.transport import PullDone
from engine.request import RequestStatus
from tests.fake_engines import CLAIM_SECONDS, LEASE_SECONDS, FakeEngine, pair, settle_all
from tests.fake_runner import BLOCK_SIZE, expected_output, prompt_of

WAITING, LOADING, RUNNING = RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING


def stages(engine: FakeEngine) -> tuple[int, int, int]:
    by_stage = engine.scheduler.num_kv_fetch_by_stage
    return by_stage["waiting_to_start"], by_stage["in_progress"], by_stage["completed_waiting"]


def test_a_request_parks_until_its_kv_is_there() -> None:
    p, d, network = pair()
    prompt = prompt_of(10)
    request = d.submit(prompt, max_tokens=3, params=p.prefill(prompt))
    assert stages(d) == (1, 0, 0)
    assert d.step() is False
    assert (request.status, stages(d)) == (LOADING, (0, 1, 0))
    assert (request.num_computed_tokens, len(request.block_ids), len(d.pool.cached)) == (10, 3, 0)
    network.advance()
    d.settle()
    assert (request.status, stages(d)) == (WAITING, (0, 0, 1))
    assert (request.num_computed_tokens, len(d.pool.cached)) == (9, 2), "the last token is computed for its logits"
    d.step()
    assert (request.status, stages(d)) == (RUNNING, (0, 0, 0))
    d.run()
    assert d.answer(request) == expected_output(prompt, max_tokens=3)
    assert d.runner.num_computed[request.request_id] == 1 + 2
    assert (request.num_cached_tokens, request.num_external_tokens) == (0, 10)
    assert d.scheduler.prompt_tokens_by_source == {"external_kv_transfer": 10, "local_cache_hit": 0, "local_compute": 1}
    settle_all(p, d, seconds=1)
    p.check_idle()
    d.check_idle()


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1])
def test_block_edges(length: int) -> None:
    p, d, _ = pair()
    prompt = prompt_of(length)
    request = d.submit(prompt, max_tokens=6, params=p.prefill(prompt))
    d.run()
    assert d.answer(request) == expected_output(prompt, max_tokens=6)
    assert d.runner.num_computed[request.request_id] == 1 + 5
    settle_all(p, d, seconds=1)
    assert (p.connector.owner.num_released_unknown, p.leases.num_ended["expired"]) == (0, 0)
    p.check_idle()
    d.check_idle()


def test_a_prompt_of_whole_blocks_names_its_last_block_after_computing_its_last_token() -> None:
    p, d, network = pair()
    request = d.submit(prompt_of(8), max_tokens=1, params=p.prefill(prompt_of(8)))
    d.step()
    network.advance()
    d.settle()
    assert (request.num_computed_tokens, len(d.pool.cached)) == (7, 1)
    d.step()
    assert d.runner.batches == [[(request.request_id, 1)]]
    assert len(d.pool.cached) == 2


def test_local_requests_run_while_others_load() -> None:
    p, d, network = pair()
    network.faults = lambda pull: Fault(before_read=2)
    loads = d.submit(prompt_of(10), max_tokens=2, params=p.prefill(prompt_of(10)))
    local = d.submit(prompt_of(6, 1), max_tokens=5)
    for _ in range(5):
        d.step()
    assert d.answer(local) == expected_output(prompt_of(6, 1), max_tokens=5)
    assert loads.status is LOADING
    d.run()
    assert d.answer(loads) == expected_output(prompt_of(10), max_tokens=2)


def test_a_loading_block_is_never_a_prefix_hit() -> None:
    p, d, network = pair()
    network.faults = lambda pull: Fault(before_read=2)
    d.submit(prompt_of(10), max_tokens=2, params=p.prefill(prompt_of(10)))
    d.step()
    twin = d.submit(prompt_of(10), max_tokens=2)
    d.step()
    assert twin.num_cached_tokens == 0
    d.run()
    assert d.answer(twin) == expected_output(prompt_of(10), max_tokens=2)


def test_what_the_local_cache_has_is_not_pulled() -> None:
    p, d, _ = pair()
    d.submit(prompt_of(18)[:9], max_tokens=1)
    d.run()
    request = d.submit(prompt_of(18), max_tokens=2, params=p.prefill(prompt_of(18)))
    d.run()
    (pull,) = d.transport.pulls
    assert (len(pull.local_block_ids), len(pull.remote_block_ids)) == (3, 3)
    assert (request.num_cached_tokens, request.num_external_tokens) == (8, 10)
    assert d.answer(request) == expected_output(prompt_of(18), max_tokens=2)
    assert d.connector.reader.num_tokens_pulled == {"prefill": 10}
    assert d.connector.reader.num_tokens_not_pulled == {("prefill", "cached"): 8}


def test_a_full_local_hit_releases_at_once() -> None:
    p, d, _ = pair()
    prompt = prompt_of(9)
    d.submit(prompt, max_tokens=1)
    d.run()
    request = d.submit(prompt, max_tokens=2, params=p.prefill(prompt))
    d.run()
    assert request.num_cached_tokens == 8, "all but the token that is computed anyway"
    assert not d.transport.pulls
    settle_all(p, d, seconds=1)
    p.check_idle()
    assert (p.leases.num_ended["released"], p.leases.num_ended["expired"]) == (1, 0)
    assert d.connector.reader.num_not_pulled == {"cached": 1}


def test_a_load_waits_for_blocks() -> None:
    p, d, _ = pair(decode={"num_blocks": 6})
    local = d.submit(prompt_of(12, 1), max_tokens=8)
    d.step()
    request = d.submit(prompt_of(13), max_tokens=2, params=p.prefill(prompt_of(13)))
    d.step()
    assert (request.status, request.block_ids) == (WAITING, [])
    d.run()
    assert d.answer(request) == expected_output(prompt_of(13), max_tokens=2)
    assert d.answer(local) == expected_output(prompt_of(12, 1), max_tokens=8)
    assert request.num_external_tokens == 13


def test_many_loads_into_a_small_pool() -> None:
    """Received KV that cannot be scheduled in the step of its arrival is neither lost nor an error."""
    p, d, _ = pair(decode={"num_blocks": 8})
    prompts = [prompt_of(11, seed) for seed in range(4)]
    requests = [d.submit(prompt, max_tokens=5, params=p.prefill(prompt)) for prompt in prompts]
    d.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert d.answer(request) == expected_output(prompt, max_tokens=5)
    settle_all(p, d)
    p.check_idle()
    d.check_idle()


def test_loaded_kv_waits_for_a_place_among_the_running() -> None:
    p, d, network = pair(decode={"max_num_seqs": 1})
    local = d.submit(prompt_of(5, 1), max_tokens=8)
    d.step()
    request = d.submit(prompt_of(10), max_tokens=2, params=p.prefill(prompt_of(10)))
    d.step()
    network.advance()
    for _ in range(3):
        d.step()
    assert (request.status, stages(d)) == (WAITING, (0, 0, 1))
    assert request.num_computed_tokens == 9
    d.run()
    assert d.runner.num_computed[request.request_id] == 1 + 1, "the loaded tokens still count"
    assert d.answer(local) == expected_output(prompt_of(5, 1), max_tokens=8)


def test_loaded_kv_gives_way_to_older_requests() -> None:
    p, d, network = pair(decode={"num_blocks": 6, "max_num_seqs": 1})
    local = d.submit(prompt_of(7, 1), max_tokens=14)
    d.step()
    request = d.submit(prompt_of(13), max_tokens=2, params=p.prefill(prompt_of(13)))
    d.step()
    network.advance()
    d.run()
    assert (local.num_preemptions, request.num_preemptions) == (0, 1)
    assert d.answer(local) == expected_output(prompt_of(7, 1), max_tokens=14)
    assert d.answer(request) == expected_output(prompt_of(13), max_tokens=2)
    assert len(d.transport.pulls) == 1, "one pull per request"
    settle_all(p, d, seconds=1)
    d.check_idle()


def test_a_load_leaves_the_blocks_that_a_prefill_is_owed() -> None:
    p, d, _ = pair(decode={"num_blocks": 12, "max_num_batched_tokens": 8})
    local = d.submit(prompt_of(40, 1), max_tokens=1)
    d.step()
    request = d.submit(prompt_of(9), max_tokens=1, params=p.prefill(prompt_of(9)))
    d.step()
    assert (d.pool.num_free, request.status) == (8, WAITING), "8 are free, but 6 of them are spoken for"
    d.run()
    assert local.num_preemptions == 0
    assert d.answer(request) == expected_output(prompt_of(9), max_tokens=1)


def test_two_loads_are_admitted_together_if_they_fit() -> None:
    p, d, _ = pair(decode={"num_blocks": 16, "max_num_batched_tokens": 8})
    d.submit(prompt_of(40, 1), max_tokens=1)
    d.step()
    requests = [d.submit(prompt_of(9, seed), params=p.prefill(prompt_of(9, seed))) for seed in (2, 3)]
    d.step()
    assert [request.status for request in requests] == [LOADING, LOADING]


def test_a_partial_load_reserves_what_is_left_to_compute() -> None:
    p, d, network = pair(decode={"num_blocks": 10})
    network.faults = lambda pull: Fault(before_read=1)
    held = p.prefill(prompt_of(16))
    request = d.submit([*prompt_of(16), *prompt_of(12, 1)], max_tokens=1, params=held)
    d.step()
    assert (request.status, len(request.block_ids)) == (LOADING, 4)
    other = d.submit(prompt_of(14, 2), max_tokens=1)
    d.step()
    assert other.status is WAITING, "6 are free, 3 are owed, it needs 4"
    d.run()
    assert request.num_external_tokens == 16
    assert d.runner.num_computed[request.request_id] == 12
    assert request.num_preemptions == 0


def test_a_long_prefill_leaves_younger_requests_a_token_each_step() -> None:
    p, d, network = pair(decode={"max_num_batched_tokens": 8})
    network.faults = lambda pull: Fault(before_read=1)
    request = d.submit(prompt_of(10), max_tokens=3, params=p.prefill(prompt_of(10)))
    d.step()
    long = d.submit(prompt_of(40, 1), max_tokens=1)
    d.step()
    network.advance(1)
    for _ in range(3):
        d.step()
    assert d.runner.batches == [[(long.request_id, 8)]] + [[(long.request_id, 7), (request.request_id, 1)]] * 3


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_abort_while_loading_keeps_the_blocks_until_the_transfer_ends(seconds: float) -> None:
    p, d, network = pair(decode={"num_blocks": 6})
    network.faults = lambda pull: Fault(before_read=2)
    request = d.submit(prompt_of(14), params=p.prefill(prompt_of(14)))
    d.step()
    network.advance(seconds)
    d.abort(request)
    d.step()
    assert d.final(request).finish_reason == "abort"
    assert (d.pool.num_used, stages(d)) == (4, (0, 0, 0))
    other = d.submit(prompt_of(14, 1), max_tokens=2)
    assert d.step() is False, "nobody may be given blocks that are still written to"
    network.advance(2)
    d.run()
    assert d.answer(other) == expected_output(prompt_of(14, 1), max_tokens=2)
    settle_all(p, d, seconds=1)
    p.check_idle()
    d.check_idle()
    assert p.leases.num_ended["expired"] == 0


def test_abort_before_admission_releases_the_lease() -> None:
    p, d, _ = pair(decode={"max_num_seqs": 1})
    request = d.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    d.abort(request)
    settle_all(p, d, seconds=1)
    p.check_idle()
    assert d.connector.reader.num_not_pulled == {"abandoned": 1}


def test_a_prompt_that_can_never_fit_releases_the_lease() -> None:
    p, d, _ = pair(decode={"num_blocks": 2})
    request = d.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    settle_all(p, d, seconds=1)
    assert d.final(request).error_status == 400
    p.check_idle()
    assert p.leases.num_ended["released"] == 1


@pytest.mark.parametrize("reason", ["handshake", "engine_id", "claim", "disconnected", "timeout", "transfer"])
def test_a_failed_load_is_computed_instead(reason: str) -> None:
    p, d, network = pair()
    network.faults = lambda pull: Fault(fails=reason, before_done=1)
    prompt = prompt_of(22)
    request = d.submit(prompt, max_tokens=3, params=p.prefill(prompt))
    other = d.submit(prompt_of(5, 1), max_tokens=8)
    d.run()
    assert d.answer(request) == expected_output(prompt, max_tokens=3)
    assert d.answer(other) == expected_output(prompt_of(5, 1), max_tokens=8)
    assert d.connector.reader.num_pulls_failed == {reason: 1}
    assert (request.num_external_tokens, len(d.transport.pulls)) == (0, 1)
    settle_all(p, d)
    p.check_idle()
    d.check_idle()


def test_a_failed_load_fails_the_request_if_that_is_the_policy() -> None:
    p, d, network = pair(decode={"policy": "fail"})
    network.faults = lambda pull: Fault(fails="transfer")
    request = d.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    other = d.submit(prompt_of(5, 1), max_tokens=8)
    d.run()
    final = d.final(request)
    assert (final.finish_reason, final.error_status, final.token_ids) == ("error", 500, [])
    assert "could not be loaded (transfer)" in (final.error or "")
    assert d.answer(other) == expected_output(prompt_of(5, 1), max_tokens=8)
    settle_all(p, d)
    d.check_idle()


def test_blocks_of_a_failed_load_are_never_a_prefix_hit() -> None:
    p, d, network = pair(decode={"policy": "fail"})
    network.faults = lambda pull: Fault(fails="transfer")
    d.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    d.run()
    twin = d.submit(prompt_of(10), max_tokens=2)
    d.run()
    assert twin.num_cached_tokens == 0
    assert d.answer(twin) == expected_output(prompt_of(10), max_tokens=2)


def test_a_failed_load_keeps_what_was_cached_here() -> None:
    p, d, network = pair()
    d.submit(prompt_of(18)[:9], max_tokens=1)
    d.run()
    network.faults = lambda pull: Fault(fails="transfer")
    request = d.submit(prompt_of(18), max_tokens=2, params=p.prefill(prompt_of(18)))
    d.run()
    assert request.num_cached_tokens == 8
    assert d.runner.num_computed[request.request_id] == 10 + 1
    assert d.answer(request) == expected_output(prompt_of(18), max_tokens=2)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("aborted", [False, True])
def test_a_stalled_load_lets_the_request_go_but_not_the_blocks(policy: str, aborted: bool) -> None:
    p, d, network = pair(decode={"policy": policy, "num_blocks": 12})
    d.submit(prompt_of(18)[:9], max_tokens=1)
    d.run()
    network.faults = lambda pull: Fault(before_claim=1, stalls=20)
    request = d.submit(prompt_of(18), max_tokens=2, params=p.prefill(prompt_of(18)))
    d.step()
    blocks = request.block_ids[2:]
    if aborted:
        d.abort(request)
    network.advance(1)
    d.run()
    if aborted or policy == "fail":
        assert d.final(request).finish_reason == ("abort" if aborted else "error")
    else:
        assert d.answer(request) == expected_output(prompt_of(18), max_tokens=2)
        assert (request.num_cached_tokens, request.num_external_tokens) == (8, 0)
    assert [d.pool.blocks[block].ref_count for block in blocks] == [1, 1, 1]
    assert d.connector.reader.num_stalled_blocks == 3
    other = d.submit(prompt_of(30, 1), max_tokens=2)
    d.run()
    network.advance(20)
    d.step()
    assert d.answer(other) == expected_output(prompt_of(30, 1), max_tokens=2)
    assert d.connector.reader.num_pulls_failed == {"timeout": 1}
    settle_all(p, d)
    p.check_idle()
    d.check_idle()


def test_heartbeats_keep_the_lease_while_the_request_queues() -> None:
    p, d, network = pair(decode={"max_num_seqs": 1})
    local = d.submit(prompt_of(5, 1), max_tokens=60)
    prompt = prompt_of(10)
    d.step()
    blocker = d.submit(prompt_of(5, 2), max_tokens=1)
    request = d.submit(prompt, max_tokens=2, params=p.prefill(prompt))
    for _ in range(40):
        d.step()
        network.advance(LEASE_SECONDS / 12)
        p.step()
    assert network.clock.now > 3 * LEASE_SECONDS
    assert (request.status, len(p.leases)) == (WAITING, 1)
    d.run()
    assert d.answer(request) == expected_output(prompt, max_tokens=2)
    assert request.num_external_tokens == 10
    assert p.leases.num_ended["expired"] == 0
    assert len(d.transport.renewals) <= 60 / 2 + 2, "one every lease/6"
    assert local.status.finished
    assert blocker.status.finished


def test_without_heartbeats_the_kv_is_computed_again() -> None:
    p, d, network = pair(decode={"max_num_seqs": 1})
    d.submit(prompt_of(5, 1), max_tokens=40)
    d.step()
    d.submit(prompt_of(5, 2), max_tokens=1)
    request = d.submit(prompt_of(10), max_tokens=2, params=p.prefill(prompt_of(10)))
    network.drop_messages = True
    for _ in range(30):
        d.step()
        network.advance(LEASE_SECONDS / 12)
        p.step()
    d.run()
    assert p.leases.num_ended["expired"] == 1
    assert d.connector.reader.num_pulls_failed == {"claim": 1}
    assert d.answer(request) == expected_output(prompt_of(10), max_tokens=2)


def test_a_read_that_outlasts_its_claim_is_not_used_even_if_the_blocks_were_given_away() -> None:
    p, d, network = pair(prefill={"num_blocks": 4})
    network.faults = lambda pull: Fault(before_read=CLAIM_SECONDS + 1)
    request = d.submit(prompt_of(14), max_tokens=2, params=p.prefill(prompt_of(14)))
    d.step()
    network.advance(CLAIM_SECONDS)
    p.submit(prompt_of(14, 1), max_tokens=1)
    p.run()
    d.run()
    assert d.answer(request) == expected_output(prompt_of(14), max_tokens=2)
    assert d.connector.reader.num_pulls_failed == {"expired": 1}
    settle_all(p, d)
    assert p.connector.owner.num_released_after_expiry == 1


def test_a_release_meant_for_queued_blocks_does_not_disturb_a_reader() -> None:
    p, d, network = pair()
    network.faults = lambda pull: Fault(before_read=1)
    params = p.prefill(prompt_of(10))
    request = d.submit(prompt_of(10), max_tokens=2, params=params)
    d.step()
    network.advance(0.1)
    d.connector.reject(params)
    network.advance(0.1)
    p.step()
    assert len(p.leases) == 1
    d.run()
    assert request.num_external_tokens == 10
    assert d.answer(request) == expected_output(prompt_of(10), max_tokens=2)


def test_the_lease_is_released_under_the_owners_name_for_it() -> None:
    p, d, _ = pair()
    params = p.prefill(prompt_of(10), request_id="cmpl-one-p")
    request = d.submit(prompt_of(10), params=params, request_id="cmpl-one-d")
    d.run()
    assert d.transport.pulls[0].remote_request_id == "cmpl-one-p"
    settle_all(p, d, seconds=1)
    assert request.request_id in d.finals
    assert (p.connector.owner.num_released_unknown, p.leases.num_ended["released"]) == (0, 1)


def test_events_for_requests_nobody_knows_change_nothing() -> None:
    _, d, _ = pair()
    d.events.append(PullDone("gone", 1, 1.0))
    d.step()
    d.check_idle()
    assert d.connector.reader.num_pulls_done == 0


def test_params_stay_as_they_came() -> None:
    p, d, _ = pair()
    params = p.prefill(prompt_of(10))
    before = params.to_json()
    request = d.submit(prompt_of(10), params=params)
    d.run()
    assert request.kv_transfer_params is params
    assert params.to_json() == before


def test_an_engine_can_be_both() -> None:
    p, d, network = pair()
    both = FakeEngine(network=network, role="both", name="b")
    held = both.prefill(prompt_of(10))
    own = both.submit(prompt_of(10), max_tokens=2, params=held)
    both.run()
    assert both.answer(own) == expected_output(prompt_of(10), max_tokens=2)
    assert own.num_cached_tokens == 8
    assert both.connector.reader.num_not_pulled == {"self": 1}
    request = both.submit(prompt_of(14, 1), max_tokens=2, params=p.prefill(prompt_of(14, 1)))
    both.run()
    assert request.num_external_tokens == 14
    settle_all(p, d, both, seconds=1)
    both.check_idle()

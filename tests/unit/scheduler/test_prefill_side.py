"""What a prefill engine leaves behind when a request has finished (vLLM's remote-decode lifecycle, in our terms)."""

from __future__ import annotations

import pytest

from connectors.transport import LeaseReleased
from connectors.wire.transfer import KVTransferParams
from engine.messages import Stop
from engine.request import RequestStatus
from tests.fake_engines import LAYOUT, LEASE_SECONDS, FakeEngine, pair
from tests.fake_runner import BLOCK_SIZE, EOS, expected_output, make_request, prompt_ending_in, prompt_of


@pytest.fixture
def p() -> FakeEngine:
    return pair()[0]


def run_leg(p: FakeEngine, prompt: list[int], **options) -> tuple[str, KVTransferParams | None]:
    options.setdefault("max_tokens", 1)
    request = p.submit(prompt, params=KVTransferParams.for_prefill(), **options)
    p.run()
    return request.request_id, p.final(request).kv_transfer_params


def test_blocks_are_held_until_the_reader_is_done(p: FakeEngine) -> None:
    request_id, params = run_leg(p, prompt_of(10))
    assert params is not None
    (blocks,) = params.remote_block_ids or [[]]
    assert [p.pool.blocks[block].ref_count for block in blocks] == [1, 1, 1]
    p.events.append(LeaseReleased(request_id))
    p.step()
    p.check_idle()


def test_the_answer_says_everything_a_reader_needs(p: FakeEngine) -> None:
    prompt = prompt_of(10)
    request_id, params = run_leg(p, prompt)
    assert params is not None
    chain = [value.hex() for value in make_request(prompt).hash_chain(10)]
    assert params.to_json() == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": params.remote_block_ids,
        "remote_engine_id": "p",
        "remote_request_id": request_id,
        "remote_host": "p.test",
        "remote_port": 8100,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 10,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
        "remote_prefill_pulled_tokens": 0,
        "remote_block_hashes": chain,
        "kv_layout": LAYOUT,
    }
    assert len(chain) == len((params.remote_block_ids or [[]])[0]) == 3


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_short_prompts_are_exported_too(p: FakeEngine, length: int) -> None:
    _, params = run_leg(p, prompt_of(length))
    assert params is not None
    assert params.remote_num_tokens == length
    assert len((params.remote_block_ids or [[]])[0]) == -(-length // BLOCK_SIZE)


def test_blocks_found_in_the_prefix_cache_are_exported_too(p: FakeEngine) -> None:
    first_id, first = run_leg(p, prompt_of(10))
    second_id, second = run_leg(p, prompt_of(10))
    assert first is not None
    assert second is not None
    assert second.remote_prefill_cached_tokens == 8
    assert (second.remote_block_ids or [[]])[0][:2] == (first.remote_block_ids or [[]])[0][:2]
    for request_id in (first_id, second_id):
        p.events.append(LeaseReleased(request_id))
        p.step()
    p.check_idle()


def test_the_blocks_at_the_end_are_exported_not_those_at_the_start() -> None:
    """Chunked prefill and a preemption in between: what was allocated first is not what holds the KV."""
    p, d, _ = pair(prefill={"num_blocks": 12, "max_num_batched_tokens": 8})
    hungry = p.submit(prompt_of(4), max_tokens=40)
    request = p.submit(prompt_of(30, 1), max_tokens=1, params=KVTransferParams.for_prefill())
    early: list[int] = []
    for _ in range(200):
        p.step()
        early = early or list(request.block_ids)
        if request.request_id in p.finals:
            break
    params = p.final(request).kv_transfer_params
    assert params is not None
    assert len((params.remote_block_ids or [[]])[0]) == 8
    answer = d.submit(prompt_of(30, 1), max_tokens=6, params=params)
    d.run()
    assert d.answer(answer) == expected_output(prompt_of(30, 1), max_tokens=6)
    assert answer.num_external_tokens == 30
    p.run()
    assert p.answer(hungry) == expected_output(prompt_of(4), max_tokens=40)


@pytest.mark.parametrize("seed", range(20))
def test_preemption_while_prefilling_exports_the_right_blocks(seed: int) -> None:
    p, d, network = pair(prefill={"num_blocks": 10, "max_num_batched_tokens": 6, "max_num_seqs": 3})
    rivals = [p.submit(prompt_of(6, 100 + seed + n), max_tokens=16) for n in range(2)]
    request = p.submit(prompt_of(13 + seed % 5, seed), max_tokens=4, params=KVTransferParams.for_prefill())
    p.run()
    params = p.final(request).kv_transfer_params
    assert params is not None
    answer = d.submit(request.prompt_token_ids, max_tokens=5, params=params)
    d.run()
    assert d.answer(answer) == expected_output(request.prompt_token_ids, max_tokens=5)
    assert not d.connector.reader.num_pulls_failed
    network.advance(LEASE_SECONDS)
    p.step()
    assert all(rival.request_id in p.finals for rival in rivals)
    p.check_idle()


@pytest.mark.parametrize("how", ["eos", "stop token", "length"])
def test_however_it_finishes_well_it_hands_over(p: FakeEngine, how: str) -> None:
    token = EOS if how == "eos" else 17
    stops = frozenset({17}) if how == "stop token" else frozenset()
    _, params = run_leg(p, prompt_ending_in(token), ignore_eos=how != "eos", stop_token_ids=stops)
    assert params is not None
    assert params.do_remote_prefill
    assert len(p.leases) == 1


def test_a_stop_string_hands_over_no_more_than_it_kept(p: FakeEngine) -> None:
    request = p.submit(prompt_of(6), max_tokens=50, params=KVTransferParams.for_prefill())
    for _ in range(8):
        p.step()
    p.scheduler.stop(Stop(request.request_id, aborted=False, num_output_tokens=3))
    p.collect()
    params = p.final(request).kv_transfer_params
    assert params is not None
    assert params.remote_num_tokens == 9
    kept = make_request([*prompt_of(6), *p.answer(request)[:3]])
    assert params.remote_block_hashes == [value.hex() for value in kept.hash_chain(9)]
    p.network.advance(LEASE_SECONDS)
    p.step()
    p.check_idle()


def test_an_aborted_request_holds_nothing(p: FakeEngine) -> None:
    request = p.submit(prompt_of(10), max_tokens=1, params=KVTransferParams.for_prefill())
    p.step(during=lambda: p.abort(request))
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert p.final(request).kv_transfer_params is None
    p.check_idle()


def test_aborting_after_the_finish_keeps_the_blocks_for_the_reader(p: FakeEngine) -> None:
    request = p.submit(prompt_of(10), max_tokens=1, params=KVTransferParams.for_prefill())
    p.run()
    p.abort(request)
    p.step()
    assert len(p.leases) == 1
    assert p.pool.num_used == 3


def test_a_request_stopped_without_blocks_offers_none() -> None:
    p, d, _ = pair(prefill={"num_blocks": 6, "max_num_seqs": 2})
    old = p.submit(prompt_of(8), max_tokens=12)
    young = p.submit(prompt_of(8, 1), max_tokens=12, params=KVTransferParams.for_prefill())
    while not young.num_preemptions:
        p.step()
    p.scheduler.stop(Stop(young.request_id, aborted=False, num_output_tokens=1))
    p.run()
    params = p.final(young).kv_transfer_params
    assert params is not None
    assert (params.remote_num_tokens, params.remote_block_ids, len(p.leases)) == (0, [[]], 0)
    assert old.request_id in p.finals
    # A hand-off of nothing needs neither a transfer nor a release.
    answer = d.submit(prompt_of(8, 1), params=params)
    d.run()
    assert d.answer(answer) == expected_output(prompt_of(8, 1))
    assert (d.transport.pulls, d.transport.releases) == ([], [])


def test_an_unread_lease_ends_by_itself(p: FakeEngine) -> None:
    request_id, _ = run_leg(p, prompt_of(10))
    assert p.connector.next_wakeup() == p.network.clock.now + LEASE_SECONDS
    p.network.advance(LEASE_SECONDS - 0.1)
    p.step()
    assert len(p.leases) == 1
    p.network.advance(0.1)
    p.step()
    p.check_idle()
    assert p.leases.num_ended["expired"] == 1
    p.events.append(LeaseReleased(request_id))
    p.step()
    assert p.connector.owner.num_released_after_expiry == 1


def test_a_second_release_frees_nothing(p: FakeEngine) -> None:
    request_id, _ = run_leg(p, prompt_of(10))
    other = p.submit(prompt_of(30, 1), max_tokens=30)
    for event in (LeaseReleased(request_id), LeaseReleased(request_id), LeaseReleased("never held")):
        p.events.append(event)
        p.step()
    assert (p.leases.num_ended["released"], p.connector.owner.num_released_unknown) == (1, 2)
    p.run()
    assert p.answer(other) == expected_output(prompt_of(30, 1), max_tokens=30)


def test_blocks_under_lease_are_not_given_to_others() -> None:
    p, _, network = pair(prefill={"num_blocks": 6})
    run_leg(p, prompt_of(14))
    waits = p.submit(prompt_of(14, 1), max_tokens=1)
    assert p.step() is False
    assert p.scheduler.num_waiting == 1
    network.advance(LEASE_SECONDS)
    p.run()
    assert p.answer(waits) == expected_output(prompt_of(14, 1), max_tokens=1)


def test_a_decode_engine_holds_nothing_for_others() -> None:
    _, d, _ = pair()
    request = d.submit(prompt_of(6), params=KVTransferParams.for_prefill())
    d.collect()
    assert (d.final(request).finish_reason, d.final(request).error_status) == ("error", 400)
    assert "do_remote_decode" in (d.final(request).error or "")

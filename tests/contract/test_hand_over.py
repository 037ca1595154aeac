"""What holds for a transfer in either direction: what is held, how it fails, what is told and counted."""

from __future__ import annotations

import logging

import pytest

from connectors.fake import Fault
from connectors.transport import PullDone, PullFailed
from connectors.wire.transfer import KVTransferParams
from engine.config import EngineConfig
from engine.messages import Stop
from engine.metrics import PULL_FAILURES, EngineMetrics
from engine.request import Request, RequestStatus
from tests.contract.talk import ASKS, after_one_turn
from tests.fake_engines import LEASE_SECONDS, OFFER_SECONDS, FakeEngine, pair, settle_all
from tests.fake_runner import BLOCK_SIZE, EOS, expected_output, kv_of, prompt_ending_in, prompt_of
from tests.unit.connectors.test_puller import Bench

LOADING, RUNNING = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING


def test_item_30_abort_while_the_blocks_are_read_does_not_disturb_the_reader() -> None:
    p, d, network = pair(prefill={"num_blocks": 4})
    network.faults = lambda pull: Fault(before_read=1.0)
    request = p.submit(prompt_of(10), max_tokens=1, params=KVTransferParams.for_prefill())
    p.run()
    reader = d.submit(prompt_of(10), max_tokens=3, params=p.said(request).for_decode())
    d.step()
    network.advance(0.5)
    p.abort(request)
    other = p.submit(prompt_of(10, 1), max_tokens=1)
    assert p.step() is False, "the blocks are still out on loan"
    d.run()
    assert reader.num_external_tokens == 10
    assert d.answer(reader) == expected_output(prompt_of(10), max_tokens=3)
    p.run()
    assert p.answer(other) == expected_output(prompt_of(10, 1), max_tokens=1)
    p.check_empty()


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_item_40_parked_request_has_one_pull_of_the_blocks_it_lacks(side: str) -> None:
    t = after_one_turn()
    if side == "prefill":
        engine, request = t.p, t.ask(t.next_prompt)
    else:
        held = t.p.prefill(t.next_prompt)
        engine = FakeEngine(network=t.network, role="decode", name="d2")
        request = engine.submit(t.next_prompt, params=held)
    engine.step()
    assert request.status is LOADING
    (pull,) = engine.transport.pulls
    assert pull.request_id == request.request_id
    assert pull.local_block_ids == tuple(request.block_ids)
    assert len(pull.remote_block_ids) == len(set(pull.remote_block_ids)) == len(request.block_ids)
    assert pull.first_block == 0
    for _ in range(3):
        engine.step()
    assert len(engine.transport.pulls) == 1


def samples(metrics: EngineMetrics, name: str) -> dict[str, float]:
    """The samples of one metric, by their `reason` label."""
    found = {}
    for line in metrics.exposition().decode().splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.split("{")[0] == name:
            found[sample.partition('reason="')[2].partition('"')[0]] = float(value)
    return found


def test_item_52_failed_pulls_of_every_kind_are_one_count_and_each_kind_its_own() -> None:
    metrics = EngineMetrics("m", kv_transfer=True)
    for reason in (*PULL_FAILURES, "news"):
        metrics.transferred(PullFailed("r", reason, "why"))
    metrics.transferred(PullDone("r", 100, 0.1))
    assert samples(metrics, "vllm:nixl_num_failed_transfers_total") == {"": len(PULL_FAILURES)}, (
        "a refused claim is none"
    )
    by_reason = samples(metrics, "backhaul_engine_kv_pulls_failed_total")
    assert by_reason == {reason: 1.0 + (reason == "other") for reason in PULL_FAILURES}
    assert samples(metrics, "vllm:nixl_xfer_time_seconds_count") == {"": 1.0}


def test_item_52_leases_that_run_out_are_no_failed_pulls() -> None:
    t = after_one_turn()
    t.p.prefill(prompt_of(10, 1))
    t.network.advance(OFFER_SECONDS)
    for engine in (t.p, t.d):
        engine.step()
        assert engine.leases.num_ended == {"expired": 1}
        assert not engine.connector.reader.num_pulls_failed


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_item_64_failed_pull_is_logged_with_what_is_needed_to_find_its_cause(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    t = after_one_turn(prefill={"policy": policy})
    t.network.faults = lambda pull: Fault(fails="disconnected")
    request = t.ask(t.next_prompt)
    with caplog.at_level(logging.WARNING):
        t.p.run()
    (line,) = [record.getMessage() for record in caplog.records if "pull failed" in record.getMessage()]
    for part in (request.request_id, "d.test:8100", "disconnected", f"recompute={policy == 'recompute'}"):
        assert part in line
    assert not any(str(token) in line.split("detail=")[0].split() for token in t.next_prompt), "no token ids in logs"


def queued(d: FakeEngine, p: FakeEngine, *seeds: int) -> list[Request]:
    """Decode legs that wait because others keep the engine busy."""
    d.submit(prompt_of(5), max_tokens=1_000)
    d.submit(prompt_of(5), max_tokens=1)
    d.step()
    return [d.submit(prompt_of(10, seed), max_tokens=2, params=p.prefill(prompt_of(10, seed))) for seed in seeds]


def test_item_77_heartbeats_name_the_leases_still_waited_for() -> None:
    p, d, network = pair(decode={"max_num_seqs": 1})
    first, second = queued(d, p, 1, 2)
    names = [request.kv_transfer_params.remote_request_id for request in (first, second)]
    told: list[tuple[str, ...]] = []

    def beat() -> list[tuple[str, ...]]:
        told.clear()
        del d.transport.renewals[:]
        network.advance(LEASE_SECONDS / 6)
        d.step()
        told.extend(request_ids for _, request_ids in d.transport.renewals)
        return told

    assert beat() == [tuple(names)]
    d.abort(first)
    assert beat() == [(names[1],)]
    d.abort(second)
    assert beat() == []


def test_item_77_heartbeats_end_with_the_pull() -> None:
    p, d, network = pair()
    network.faults = lambda pull: Fault(before_claim=LEASE_SECONDS / 2)
    request = d.submit(prompt_of(10), max_tokens=200, params=p.prefill(prompt_of(10)))
    for _ in range(6):
        d.step()
        network.advance(LEASE_SECONDS / 6)
    assert request.num_external_tokens == 10
    assert len(d.transport.renewals) == 2, "the lease is wanted until it is claimed"
    for _ in range(6):
        d.step()
        network.advance(LEASE_SECONDS / 6)
    assert request.status is RUNNING
    assert len(d.transport.renewals) == 2


def test_item_77_offers_are_never_renewed() -> None:
    t = after_one_turn(prefill={"max_num_seqs": 1, "num_blocks": 8})
    t.p.submit(prompt_of(20, 1), max_tokens=12)
    t.p.step()
    request = t.ask(t.next_prompt)
    for _ in range(8):
        t.p.step()
        t.network.advance(LEASE_SECONDS)
    assert request.status is RequestStatus.WAITING
    assert t.p.transport.renewals == []
    assert t.p.connector.next_wakeup() is None


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    "reason", ["handshake", "engine_id", "claim", "disconnected", "timeout", "expired", "transfer"]
)
def test_item_81_failed_pull_of_a_history_costs_that_request_a_recompute_or_the_request(
    policy: str, reason: str
) -> None:
    t = after_one_turn(prefill={"policy": policy})
    t.network.faults = lambda pull: Fault(fails=reason, before_done=1)
    request = t.ask(t.next_prompt)
    other = t.p.submit(prompt_of(9, 1), max_tokens=6)
    t.p.run()
    assert t.p.answer(other) == expected_output(prompt_of(9, 1), max_tokens=6)
    assert t.p.connector.reader.num_pulls_failed == {reason: 1}
    t.network.faults = lambda pull: Fault()
    if policy == "fail":
        final = t.p.final(request)
        assert (final.finish_reason, final.error_status, final.token_ids) == ("error", 500, [])
        assert final.kv_transfer_params is None
        # The blocks meant for the load are not found by the next to ask for the same.
        request = t.p.submit(t.next_prompt, max_tokens=1, params=KVTransferParams.for_prefill())
        t.p.run()
    assert t.p.runner.num_computed[request.request_id] == len(t.next_prompt)
    assert (request.num_cached_tokens, request.num_external_tokens) == (0, 0)
    t.check_turn(request)
    settle_all(t.p, t.d, seconds=OFFER_SECONDS + 1)
    t.p.check_empty()
    t.d.check_empty()


@pytest.mark.parametrize("how", ["abort", "stop string"])
def test_item_86_decode_aborted_in_its_last_step_offers_nothing(how: str) -> None:
    p, d, _ = pair()
    request = d.submit(prompt_of(10), max_tokens=1, params=p.prefill(prompt_of(10)))
    d.step()
    d.network.advance()
    if how == "abort":
        d.step(during=lambda: d.abort(request))
        assert (d.final(request).finish_reason, d.final(request).kv_transfer_params) == ("abort", None)
        d.check_empty()
    else:
        d.step(during=lambda: d.scheduler.stop(Stop(request.request_id, aborted=False, num_output_tokens=0)))
        assert d.final(request).finish_reason == "stop"
        assert (d.said(request).remote_num_tokens or 0) <= 10


@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1, 30])
@pytest.mark.parametrize("known_to", ["nobody", "decode", "decode in part", "prefill", "both"])
def test_item_88_answer_is_that_of_one_engine_whatever_either_has_cached(length: int, known_to: str) -> None:
    p, d, _ = pair()
    prompt = prompt_of(length)
    if known_to.startswith("decode"):
        d.submit(prompt[: max(1, length // 2)] if known_to.endswith("part") else prompt, max_tokens=1)
    if known_to in ("prefill", "both"):
        p.submit(prompt, max_tokens=1)
    if known_to == "both":
        d.submit(prompt, max_tokens=1)
    p.run()
    d.run()
    held = p.prefill(prompt)
    answer, offer = d.decode(prompt, held, max_tokens=6)
    assert answer == expected_output(prompt, max_tokens=6)
    # And so is the next turn's, on what this one has left.
    longer = [*prompt, *answer, *ASKS]
    answer, _ = d.decode(longer, p.prefill(longer, offer=offer), max_tokens=6)
    assert answer == expected_output(longer, max_tokens=6)
    settle_all(p, d, seconds=LEASE_SECONDS + 1)
    p.check_empty()
    d.check_idle()
    assert p.leases.num_ended == {"released": 2}
    assert p.connector.owner.num_released_unknown == d.connector.owner.num_released_unknown == 0


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
@pytest.mark.parametrize("num_answer", [1, 2])
def test_hand_overs_shorter_than_a_block_need_no_release_that_nobody_expects(length: int, num_answer: int) -> None:
    """In both directions: whoever holds nothing is told nothing, and whoever holds something is told once."""
    p, d, _ = pair()
    prompt = prompt_of(length)
    for _ in range(3):
        held = p.prefill(prompt)
        answer, offer = d.decode(prompt, held, max_tokens=num_answer)
        assert answer == expected_output(prompt, max_tokens=num_answer)
        prompt = [*prompt, *answer, 7]
        held = p.prefill(prompt, offer=offer)
        d.decode(prompt, held, max_tokens=1)
    settle_all(p, d, seconds=LEASE_SECONDS + 1)
    for engine in (p, d):
        assert engine.connector.owner.num_released_unknown == 0
        assert engine.connector.owner.num_released_after_expiry == 0
        engine.check_idle()
    assert p.leases.num_ended == {"released": 6}


@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in range(0, 100, 25)], ids=str)
def test_blocks_told_at_the_end_hold_the_kv_whatever_was_preempted_before(seeds: range) -> None:
    """Prompts longer than a step's budget, beside an older request that takes their room: what they were given first
    is long somebody else's."""
    num_preempted = 0
    for seed in seeds:
        tight = {"num_blocks": 16, "max_num_batched_tokens": 5, "max_num_seqs": 3}
        p, d, _ = pair(prefill=tight, decode=tight)
        first, offer = prompt_of(28 + seed % 5, seed), None
        for prompt in (first, [*first, *expected_output(first, max_tokens=8), *ASKS]):
            rivals = [(engine, engine.submit(prompt_of(7, n), max_tokens=20)) for engine in (p, d) for n in (1, 2)]
            request = p.submit(prompt, max_tokens=1 + seed % 4, params=KVTransferParams.for_prefill(offer))
            held = end(p, request)
            reader = d.submit(prompt, max_tokens=8, params=held.for_decode())
            offer = end(d, reader)
            assert d.answer(reader) == expected_output(prompt, max_tokens=8)
            num_preempted += request.num_preemptions + reader.num_preemptions
            for engine, rival in rivals:
                engine.run()
                assert engine.answer(rival) == expected_output(rival.prompt_token_ids, max_tokens=20)
    assert num_preempted >= len(seeds) // 2, "else this shows little"


def end(engine: FakeEngine, request: Request) -> KVTransferParams:
    """Run until the request ends. The blocks named in its answer hold the KV of the tokens they are said to hold."""
    for _ in range(2_000):
        if request.request_id in engine.finals:
            break
        if not engine.step():
            engine.network.advance(0.1)
    told = engine.said(request)
    num_tokens = told.remote_num_tokens or 0
    held = [value for block_id in told.remote_block_ids[0] for value in engine.kv.read(block_id)]
    assert held[:num_tokens] == kv_of(request.token_ids[:num_tokens])
    assert told.remote_block_hashes == [value.hex() for value in request.hash_chain(num_tokens)]
    return told


def test_many_histories_into_a_small_pool() -> None:
    """Four legs that each need three of eight blocks, at a prefill engine that pulls all of them from decode."""
    p, d, network = pair(prefill={"num_blocks": 8})
    talks = []
    for seed in range(4):
        prompt = prompt_of(6, seed)
        answer, offer = d.decode(prompt, KVTransferParams.for_decode_alone(), max_tokens=4)
        talks.append(([*prompt, *answer, 7], offer))
    requests = [p.submit(prompt, max_tokens=1, params=KVTransferParams.for_prefill(offer)) for prompt, offer in talks]
    assert [-(-request.num_prompt_tokens // BLOCK_SIZE) for request in requests] == [3] * 4
    done: set[str] = set()
    for _ in range(200):
        p.step()
        network.advance(0.1)
        for request in requests:
            if request.request_id in p.finals and request.request_id not in done:
                done.add(request.request_id)
                prompt = request.prompt_token_ids
                assert p.answer(request) == expected_output(prompt, max_tokens=1)
                answer, _ = d.decode(prompt, p.said(request).for_decode(), max_tokens=4)
                assert answer == expected_output(prompt, max_tokens=4)
    assert len(done) == 4
    settle_all(p, d, seconds=LEASE_SECONDS + 1)
    p.check_empty()


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("thinking", [1, 3, 4, 9])
def test_reasoning_missing_from_the_next_prompt_is_not_pulled_from_behind(thinking: int, hashes: bool) -> None:
    """Decode holds prompt, thinking and answer; the next prompt goes from prompt to answer. Even a router that has
    compared nothing and left out the hashes makes no wrong answer of it."""
    p, d, _ = pair()
    prompt = prompt_of(10)
    said, offer = d.decode(prompt, p.prefill(prompt), max_tokens=thinking + 6)
    p2 = FakeEngine(network=p.network, role="prefill", name="p2")
    following = [*prompt, *said[thinking:], *ASKS, *prompt_of(9, 3)]
    request = p2.submit(
        following,
        max_tokens=1,
        params=KVTransferParams.for_prefill(offer if hashes else offer.without("remote_block_hashes")),
    )
    p2.run()
    assert request.num_external_tokens == (8 if hashes else 0)
    assert p2.answer(request) == expected_output(following, max_tokens=1)
    answer, _ = d.decode(following, p2.said(request).for_decode(), max_tokens=6)
    assert answer == expected_output(following, max_tokens=6)


def test_prefill_that_ends_with_its_first_token_hands_over_and_nothing_runs_out() -> None:
    p, d, network = pair()
    prompt = prompt_ending_in(EOS)
    leg = p.submit(prompt, max_tokens=1, ignore_eos=False, params=KVTransferParams.for_prefill())
    p.run()
    assert p.final(leg).finish_reason == "stop"
    reader = d.submit(prompt, max_tokens=9, ignore_eos=False, params=p.said(leg).for_decode())
    d.run()
    assert (d.final(reader).finish_reason, d.answer(reader)) == ("stop", [EOS])
    assert network.clock.now < 1.0
    settle_all(p, d, seconds=1)
    assert p.leases.num_ended == {"released": 1}


def test_item_46_pulls_from_one_peer_share_one_handshake() -> None:
    bench = Bench()
    try:
        for number in range(5):
            bench.pull(f"r{number}")
        bench.until(lambda: len(bench.agent.reads) == 5)
        (peer,) = bench.puller._peers.values()
        assert (peer.num_handshakes, bench.agent.num_links) == (1, 1)
    finally:
        bench.close()


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_item_70_kv_role_is_taken_and_decides_nothing(role: str, kv_role: str) -> None:
    told = EngineConfig.model_validate(
        {"model": "m", "role": role, "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": kv_role}}
    )
    assert (told.role, told.kv_transfer_enabled) == (role, True)

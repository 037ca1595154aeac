"""What the connector makes of transfer params: which remote blocks it trusts, and which it refuses."""

from __future__ import annotations

import pytest

from connectors.wire.transfer import KVTransferParams, WireError
from tests.fake_engines import FORGERIES, OF_ITS_OWN_PROMPT, FakeEngine, forge, pair, settle_all
from tests.fake_runner import expected_output, prompt_of


def decode(d: FakeEngine, prompt: list[int], params: KVTransferParams) -> int:
    """Run a decode leg, check its answer, and return how many prompt tokens were loaded."""
    request = d.submit(prompt, max_tokens=3, params=params)
    d.run()
    assert d.answer(request) == expected_output(prompt, max_tokens=3)
    return request.num_external_tokens


@pytest.fixture
def engines() -> tuple[FakeEngine, FakeEngine]:
    p, d, _ = pair()
    return p, d


@pytest.mark.parametrize(
    ("prompt", "loaded"),
    [
        (prompt_of(18), 18),
        ([*prompt_of(18), 7], 18),
        ([*prompt_of(17), 7], 16),
        ([*prompt_of(18)[:9], 7, *prompt_of(18)[10:]], 8),
        (prompt_of(18)[:10], 8),
        (prompt_of(18)[:8], 8),
        ([7, *prompt_of(18)[1:]], 0),
        ([*prompt_of(16), *prompt_of(20, 9)], 16),
    ],
    ids=[
        "same",
        "longer",
        "other last token",
        "edited",
        "shorter",
        "shorter by whole blocks",
        "other start",
        "other end",
    ],
)
def test_only_the_hash_equal_prefix_is_loaded(
    engines: tuple[FakeEngine, FakeEngine], prompt: list[int], loaded: int
) -> None:
    p, d = engines
    assert decode(d, prompt, p.prefill(prompt_of(18))) == loaded
    settle_all(p, d, seconds=1)
    p.check_idle()
    assert p.leases.num_ended["expired"] == 0


def test_tokens_generated_by_the_prefill_engine_are_part_of_the_prefix(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    params = p.prefill(prompt_of(10), max_tokens=5)
    prompt = [*prompt_of(10), *expected_output(prompt_of(10), max_tokens=4)]
    assert params.remote_num_tokens == 14
    assert decode(d, prompt, params) == 14


def test_another_salt_loads_nothing(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    request = d.submit(prompt_of(10), params=p.prefill(prompt_of(10)), hash_seed=b"another salt")
    d.run()
    assert request.num_external_tokens == 0
    assert d.connector.reader.num_not_pulled == {"hashes": 1}


@pytest.mark.parametrize(
    ("prompt", "loaded", "failed"),
    [
        (prompt_of(10), 10, {}),
        ([*prompt_of(10), 7], 10, {}),
        (prompt_of(9), 8, {}),
        (prompt_of(8), 8, {}),
        (prompt_of(10, 1), 0, {"hashes": 1}),
        ([*prompt_of(8), 7, 7, 7], 0, {"hashes": 1}),
    ],
    ids=["same", "longer", "shorter", "shorter by whole blocks", "other", "other end"],
)
def test_without_hashes_the_owner_tells_at_the_claim(
    engines: tuple[FakeEngine, FakeEngine], prompt: list[int], loaded: int, failed: dict[str, int]
) -> None:
    p, d = engines
    bare = p.prefill(prompt_of(10)).without("remote_block_hashes")
    assert decode(d, prompt, bare) == loaded
    assert d.connector.reader.num_pulls_failed == failed
    settle_all(p, d, seconds=1)
    p.check_idle()


def test_without_hashes_a_prompt_within_the_first_block_is_computed(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    assert decode(d, prompt_of(3), p.prefill(prompt_of(10)).without("remote_block_hashes")) == 0
    assert d.connector.reader.num_not_pulled == {"length": 1}
    settle_all(p, d, seconds=1)
    p.check_idle()


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_params_load_nothing_and_leave_nothing_behind(
    engines: tuple[FakeEngine, FakeEngine], forgery: str
) -> None:
    p, d = engines
    victim, prompt = prompt_of(18, 1), prompt_of(18, 2)
    forged = forge(forgery, p.prefill(victim), p.prefill(prompt))
    target = victim if forgery in OF_ITS_OWN_PROMPT else prompt
    assert decode(d, target, forged) == 0
    settle_all(p, d, seconds=1)
    assert len(p.leases) == 1, "the forged one is given back, the other one untouched"
    for seed in (1, 2):
        honest = [*prompt_of(18, seed), 7]
        decode(d, honest, p.prefill(honest))
    settle_all(p, d)
    p.check_idle()
    d.check_idle()


def test_the_part_that_is_pulled_is_compared_in_its_place(engines: tuple[FakeEngine, FakeEngine]) -> None:
    """The local cache has the start of the prompt; what follows is neither the lease's start nor all of it."""
    p, d = engines
    decode(d, prompt_of(18)[:9], p.prefill(prompt_of(18)[:9]))
    params = p.prefill([*prompt_of(18), 7, 8, 9, 10])
    assert decode(d, prompt_of(16), params) == 8
    (_, pull) = d.transport.pulls
    assert (pull.first_block, len(pull.block_hashes)) == (2, 2)
    assert not d.connector.reader.num_pulls_failed


@pytest.mark.parametrize("kv_layout", [None, "another layout"])
def test_kv_of_an_unknown_layout_is_not_loaded(engines: tuple[FakeEngine, FakeEngine], kv_layout: str | None) -> None:
    p, d = engines
    params = p.prefill(prompt_of(10))
    params = params.without("kv_layout") if kv_layout is None else params.with_(kv_layout=kv_layout)
    assert decode(d, prompt_of(10), params) == 0
    assert d.connector.reader.num_not_pulled == {"layout": 1}
    settle_all(p, d, seconds=1)
    p.check_idle()


def test_blocks_of_another_size_are_not_an_error(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    params = p.prefill(prompt_of(10)).with_(kv_layout=None, remote_block_ids=[[0]], remote_block_hashes=None)
    assert decode(d, prompt_of(10), params) == 0


def test_hashes_of_more_than_the_tokens_count_as_far_as_they_are_of_whole_blocks(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    p, d = engines
    assert decode(d, prompt_of(12), p.prefill(prompt_of(12)).with_(remote_num_tokens=9)) == 8


def test_two_requests_with_one_lease_never_both_read_it(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    params = p.prefill(prompt_of(10))
    requests = [d.submit(prompt_of(10), max_tokens=2, params=params) for _ in range(2)]
    d.run()
    for request in requests:
        assert d.answer(request) == expected_output(prompt_of(10), max_tokens=2)
    assert (d.connector.reader.num_pulls_done, d.connector.reader.num_pulls_failed) == (1, {"claim": 1})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_request_id": None}, "remote_request_id"),
        ({"remote_num_tokens": None}, "remote_num_tokens"),
        ({"remote_num_tokens": 13}, "remote_num_tokens"),
        ({"remote_num_tokens": 8}, "remote_num_tokens"),
        ({"remote_block_ids": [[0, 1], [2]]}, "remote_block_ids"),
        ({"remote_block_hashes": ["00"]}, "remote_block_hashes"),
    ],
)
def test_inconsistent_params_are_refused_by_name(
    engines: tuple[FakeEngine, FakeEngine], change: dict[str, object], param: str
) -> None:
    p, d = engines
    params = p.prefill(prompt_of(10)).with_(**change)
    with pytest.raises(WireError) as caught:
        d.connector.check(params)
    assert caught.value.param == f"kv_transfer_params.{param}"
    request = d.submit(prompt_of(10), params=params)
    d.collect()
    assert (d.final(request).finish_reason, d.final(request).error_status) == ("error", 400)
    assert param in (d.final(request).error or "")
    d.check_idle()


def test_a_refusal_releases_what_it_can_name(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, _ = engines
    other_p = FakeEngine(network=p.network, role="prefill", name="p2")
    request = other_p.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    settle_all(p, other_p, seconds=1)
    assert "do_remote_prefill" in (other_p.final(request).error or "")
    p.check_idle()
    assert p.leases.num_ended["released"] == 1


def test_requests_without_params_are_left_alone(engines: tuple[FakeEngine, FakeEngine]) -> None:
    _, d = engines
    for params in (None, KVTransferParams(), KVTransferParams(do_remote_prefill=False, do_remote_decode=False)):
        request = d.submit(prompt_of(10), params=params)
        d.run()
        assert d.final(request).kv_transfer_params is None
    assert (d.transport.pulls, d.transport.releases, d.transport.renewals) == ([], [], [])


def test_heartbeats_go_out_once_per_peer_and_interval() -> None:
    p, d, network = pair(decode={"max_num_seqs": 1})
    p2 = FakeEngine(network=network, role="prefill", name="p2")
    d.submit(prompt_of(5), max_tokens=1000)
    d.submit(prompt_of(5), max_tokens=1)
    d.step()
    params = [p.prefill(prompt_of(10, 1)), p.prefill(prompt_of(10, 2)), p2.prefill(prompt_of(10, 3))]
    requests = [d.submit(prompt_of(10, seed), params=held) for seed, held in enumerate(params, 1)]
    d.step()
    assert [(peer.engine_id, len(ids)) for peer, ids in d.transport.renewals] == [("p", 2), ("p2", 1)]
    assert d.connector.next_wakeup() == network.clock.now + 1.0, "lease/6"
    network.advance(0.9)
    d.step()
    assert len(d.transport.renewals) == 2
    network.advance(0.1)
    d.step()
    assert len(d.transport.renewals) == 4
    for request in requests:
        d.abort(request)
    network.advance(1.0)
    d.step()
    assert len(d.transport.renewals) == 4, "nothing is renewed for requests that ended"


def test_a_request_admitted_at_once_needs_no_heartbeat(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    decode(d, prompt_of(10), p.prefill(prompt_of(10)))
    assert d.transport.renewals == []


def test_bytes_are_those_of_the_blocks_moved(engines: tuple[FakeEngine, FakeEngine]) -> None:
    p, d = engines
    decode(d, prompt_of(10), p.prefill(prompt_of(10)))
    assert d.connector.reader.num_bytes_pulled == 3 * len(d.kv.read(0))
    assert (d.connector.reader.num_pulls_done, d.connector.reader.num_tokens_pulled) == (1, {"prefill": 10})
    assert (p.leases.num_granted, p.leases.num_ended["released"]) == (1, 0)
    p.settle()
    assert p.leases.num_ended["released"] == 1


def test_closing_sends_the_releases_that_are_due() -> None:
    p, d, network = pair()
    request = d.submit(prompt_of(10), params=p.prefill(prompt_of(10)))
    d.abort(request)
    d.connector.close()
    network.advance()
    p.step()
    p.check_idle()

"""What answers show of an engine, and what a router makes of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from connectors.wire.transfer import KVTransferParams
from router.capabilities import UNKNOWN, Capabilities
from router.known import MAX_TRIES, NUM_IDS, Known

VLLM = Capabilities(kind="vllm", version="0.32.0", block_size=32)


def params(num_tokens: int = 100, *, size: int = 32, engine_id: str = "e", **more: Any) -> KVTransferParams:
    blocks = list(range(-(-num_tokens // size)))
    return KVTransferParams(remote_block_ids=[blocks], remote_num_tokens=num_tokens, remote_engine_id=engine_id, **more)


def vllm(role: str = "decode", stated: Capabilities = UNKNOWN) -> Known:
    known = Known("http://e:1", role, stated)
    known.found(VLLM)
    return known


def test_offer_in_a_stream_shows_what_the_version_denies() -> None:
    known = vllm()
    known.saw_decode(params(), endpoint="chat", pulled=True, streamed=True)
    assert (known.now.streams_carry_params, known.now.sources["streams_carry_params"]) == (True, "seen")
    assert known.now.bidirectional is True


@pytest.mark.parametrize("streamed", [False, True])
def test_answer_without_an_offer_shows_something_only_if_one_was_due(streamed: bool) -> None:
    known = vllm()
    known.saw_decode(None, endpoint="chat", pulled=True, streamed=streamed, stop_reason="a stop string")
    known.saw_decode(None, endpoint="chat", pulled=False, streamed=streamed)
    assert known.now.bidirectional is None
    known.saw_decode(None, endpoint="chat", pulled=True, streamed=streamed)
    assert known.now.bidirectional is (None if streamed else False)


def test_stream_without_an_offer_shows_it_once_offers_are_known_to_be_made() -> None:
    known = Known("http://e:1", "decode")
    known.found(Capabilities(kind="vllm", version="0.33.0"))
    known.saw_decode(params(), endpoint="chat", pulled=True, streamed=False)
    assert known.now.streams_carry_params is True
    known.saw_decode(None, endpoint="generate", pulled=True, streamed=True)
    assert known.now.streams_carry_params is True
    known.saw_decode(None, endpoint="chat", pulled=True, streamed=True)
    assert known.now.streams_carry_params is False


def test_what_has_worked_works_until_it_is_another_engine() -> None:
    known = vllm()
    known.saw("tokenize", True)
    known.saw("tokenize", False)
    assert known.now.tokenize is True
    known.found(VLLM)
    assert known.now.tokenize is True
    known.found(Capabilities(kind="vllm", version="0.33.0"))
    assert known.now.tokenize is None


def test_unanswered_probe_takes_nothing_away() -> None:
    known = vllm()
    known.found(Capabilities(kind="vllm"), complete=False)
    assert (known.now.block_size, known.now.version, known.stale) == (32, "0.32.0", True)
    for _ in range(MAX_TRIES):
        known.found(Capabilities(kind="vllm"), complete=False)
    assert not known.stale


def test_one_that_was_down_is_forgotten() -> None:
    known = vllm()
    known.saw("tokenize", False)
    known.forget()
    assert known.now == Known("http://e:1", "decode").now
    assert known.stale


def test_new_engine_id_has_it_probed_again() -> None:
    known = vllm()
    known.saw_params(params(engine_id="one"))
    known.saw_params(params(engine_id="one_dp1"))
    assert not known.stale
    known.saw("tokenize", False)
    known.saw_params(params(engine_id="two"))
    assert known.stale
    assert known.now.tokenize is None


def test_door_to_many_engines_is_not_probed_for_ever() -> None:
    known = vllm()
    for number in range(NUM_IDS):
        known.saw_params(params(engine_id=f"replica-{number}"))
    known.found(VLLM)
    for number in range(100):
        known.saw_params(params(engine_id=f"replica-{number}"))
    assert not known.stale


def test_block_size_that_does_not_fit_the_blocks_is_not_used() -> None:
    known = vllm()
    known.saw_params(params(100, size=32))
    assert known.now.block_size == 32
    known.saw_params(params(100, size=16))
    assert known.now.block_size is None
    known.found(VLLM)
    assert known.now.block_size is None
    known.forget()
    known.found(VLLM)
    assert known.now.block_size == 32


def test_stated_block_size_is_believed() -> None:
    known = vllm(stated=Capabilities(block_size=48))
    known.saw_params(params(100, size=16))
    assert known.now.block_size == 48


def test_one_turn_finds_out_whether_an_engine_can_pull() -> None:
    known = vllm("prefill")
    assert known.pulls
    with known.given_blocks():
        assert not known.pulls
    assert known.pulls
    known.saw_prefill(params(1000, remote_prefill_cached_tokens=900), told_ids=True, offered=params(990))
    assert known.now.bidirectional is None, "it had almost all of it, and may not have pulled"
    known.saw_prefill(params(1000, remote_prefill_cached_tokens=0), told_ids=True, offered=params(990))
    assert known.now.bidirectional is True
    with known.given_blocks():
        assert known.pulls


def test_engine_that_hung_at_blocks_is_given_none() -> None:
    known = vllm("prefill")
    known.saw("bidirectional", False)
    assert not known.pulls


def test_prefill_answer_without_ids() -> None:
    known = vllm("prefill")
    known.saw_prefill(None, told_ids=None)
    assert known.now.return_token_ids is True
    known.saw_prefill(None, told_ids=False)
    assert known.now.return_token_ids is False


def test_log_has_one_line_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    known = vllm()
    for _ in range(50):
        known.saw("tokenize", False)
        known.saw("tokenize", True)
        known.found(VLLM)
    assert [record.getMessage() for record in caplog.records] == ["engine can", "engine shows", "engine shows"]


def test_engine_that_is_not_as_stated_is_logged_and_the_statement_kept(caplog: pytest.LogCaptureFixture) -> None:
    known = vllm("prefill", Capabilities(bidirectional=True))
    for _ in range(3):
        known.saw("bidirectional", False)
    assert known.now.bidirectional is True
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "engine is not as stated"
    ]

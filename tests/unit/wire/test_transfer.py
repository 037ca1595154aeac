"""The transfer dictionaries: what engines really send comes through unchanged, what must not be used is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from connectors.wire.transfer import ECTransferParams, KVTransferParams, WireError

DATA = Path(__file__).parents[2] / "data"
PREFILL = json.loads((DATA / "vllm_prefill_answer.json").read_text())["kv_transfer_params"]
DECODE = json.loads((DATA / "vllm_decode_answer.json").read_text())["kv_transfer_params"]


@pytest.mark.parametrize("recorded", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_recorded_answer_comes_through_unchanged(recorded: dict[str, Any]) -> None:
    sent = KVTransferParams.parse(recorded).to_json()
    assert sent == recorded
    assert json.loads(json.dumps(sent)) == recorded


def test_unknown_keys_are_carried_and_absent_ones_stay_absent() -> None:
    wire = {"do_remote_prefill": True, "from_the_future": {"a": [1, None]}, "remote_port": None}
    assert KVTransferParams.parse(wire).to_json() == wire


def test_prefill_answer_becomes_a_decode_leg() -> None:
    leg = KVTransferParams.parse(PREFILL).for_decode().with_(prompt_token_ids=[5, 6]).to_json()
    assert leg == {**PREFILL, "prompt_token_ids": [5, 6]}


def test_decode_answer_becomes_the_next_prefill_leg() -> None:
    assert KVTransferParams.for_prefill(KVTransferParams.parse(DECODE)).to_json() == DECODE
    assert KVTransferParams.for_prefill().to_json() == {"do_remote_decode": True, "do_remote_prefill": False}


def test_engine_internal_keys_never_go_on() -> None:
    answer = {**PREFILL, "_remote_blocks_processed": True, "_p_side_truncated": True, "prompt_token_ids": [1]}
    assert KVTransferParams.parse(answer).for_decode().to_json() == PREFILL


def test_remote_blocks_of_the_recorded_answer() -> None:
    remote = KVTransferParams.parse(PREFILL).remote_blocks(block_size=32)
    assert remote is not None
    assert (remote.host, remote.port, remote.num_tokens) == ("127.0.0.1", 5600, 638)
    assert remote.block_ids == tuple(range(1, 21))
    assert remote.block_hashes == ()


@pytest.mark.parametrize(
    ("wire", "key"),
    [
        ("text", "kv_transfer_params"),
        ([], "kv_transfer_params"),
        (None, "kv_transfer_params"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_prefill": "true"}, "do_remote_prefill"),
        ({"remote_port": "8000"}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_num_tokens": -1}, "remote_num_tokens"),
        ({"remote_num_tokens": 1.0}, "remote_num_tokens"),
        ({"remote_block_ids": [1, 2]}, "remote_block_ids.0"),
        ({"remote_block_ids": [[1, "2"]]}, "remote_block_ids.0.1"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids.0.0"),
        ({"remote_block_ids": [[]] * 65}, "remote_block_ids"),
        ({"remote_host": 127}, "remote_host"),
        ({"tp_size": 0}, "tp_size"),
        ({"remote_blocks_expiry_time": float("nan")}, "remote_blocks_expiry_time"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids.1"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids.0"),
        ({"remote_block_hashes": "ab"}, "remote_block_hashes"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "cannot both be true"),
    ],
)
def test_bad_dictionary_is_refused_naming_the_key(wire: object, key: str) -> None:
    with pytest.raises(WireError) as refused:
        KVTransferParams.parse(wire)
    assert key in str(refused.value)
    assert refused.value.param.startswith("kv_transfer_params")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_request_id": ""}, "remote_request_id"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_num_tokens": None}, "remote_num_tokens"),
        ({"remote_num_tokens": 641}, "remote_num_tokens"),
        ({"remote_num_tokens": 608}, "remote_num_tokens"),
        ({"remote_block_ids": [[1], [2]]}, "remote_block_ids"),
        ({"remote_block_hashes": ["aa"]}, "remote_block_hashes"),
    ],
)
def test_blocks_that_would_hang_or_corrupt_the_reader_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(WireError) as refused:
        KVTransferParams.parse({**PREFILL, **change}).remote_blocks(block_size=32)
    assert refused.value.param == f"kv_transfer_params.{key}"


@pytest.mark.parametrize("change", [{"remote_block_ids": None}, {"remote_block_ids": [[]]}, {"remote_block_ids": []}])
def test_decode_engine_is_never_told_to_pull_nothing(change: dict[str, Any]) -> None:
    params = KVTransferParams.parse({**PREFILL, **change})
    assert params.remote_blocks() is None
    with pytest.raises(WireError):
        params.for_decode()


def test_decode_answer_is_not_taken_for_a_prefill_answer() -> None:
    with pytest.raises(WireError):
        KVTransferParams.parse(DECODE).for_decode()


PICTURE = {"modality": "image", "metadata": {"image_grid_thw": [1, 4, 4]}, "item_indices": [0, 2], "shape": [16, 64]}


def test_what_was_not_given_is_left_out_as_pydantic_would() -> None:
    params = KVTransferParams.parse({**DECODE, "remote_host": None, "unknown": {"a": [1]}})
    assert params.to_json() == params.model_dump(exclude_unset=True)


def test_nothing_to_remove_leaves_the_same_params() -> None:
    params = KVTransferParams.parse({**DECODE, "unknown": 1})
    assert params.without("transfer_id", "other") is params
    assert params.without("unknown").to_json() == DECODE


def test_offer_for_prefill_counts_as_given_and_the_one_it_was_is_unchanged() -> None:
    offer = KVTransferParams.parse({"remote_host": "d", "unknown": 1})
    flags = {"do_remote_decode": True, "do_remote_prefill": False}
    assert KVTransferParams.for_prefill(offer).to_json() == {**offer.to_json(), **flags}
    assert offer.to_json() == {"remote_host": "d", "unknown": 1}


def test_encoder_answer_comes_through_unchanged() -> None:
    wire = {"hash-1": {**PICTURE, "size_bytes": 4096, "novel": 1}, "consumer_zmq": "tcp://10.0.0.1:1"}
    params = ECTransferParams.parse(wire)
    assert params.to_json() == wire
    assert list(params.items) == ["hash-1"]


def test_encoder_answers_merge_without_touching_either() -> None:
    first, second = ECTransferParams.parse({"a": PICTURE}), ECTransferParams.parse({"b": PICTURE})
    assert first.merge(second).to_json() == {"a": PICTURE, "b": PICTURE}
    assert first.to_json() == {"a": PICTURE}


@pytest.mark.parametrize(
    ("wire", "key"),
    [
        ([], "ec_transfer_params"),
        ({"h": 5}, "ec_transfer_params.h"),
        ({"h": {"peer_port": "1"}}, "peer_port"),
        ({"h": {"shape": [1]}}, "shape"),
        ({"h": {"item_indices": [-1]}}, "item_indices.0"),
        ({"ec_items": [{"mm_hash": "x"}]}, "transfer_id"),
    ],
)
def test_bad_encoder_params_are_refused_naming_the_key(wire: object, key: str) -> None:
    with pytest.raises(WireError) as refused:
        ECTransferParams.parse(wire)
    assert key in str(refused.value)

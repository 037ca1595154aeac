"""Who can be told that blocks are not wanted, and what exactly is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connectors.wire.transfer import KVTransferParams, WireError
from router.capabilities import Capabilities
from router.release import tells, unwanted

VLLM = Capabilities(kind="vllm", version="0.32.0", block_size=32, cache_dtype="auto")
PULLS = replace(VLLM, bidirectional=True)
OFFER: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "e-1",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 90,
    "remote_blocks_expiry_time": 1234.5,
    "transfer_mode": "pull",
}


def test_unwanted_blocks_hold_nothing_to_wait_for() -> None:
    told = unwanted(KVTransferParams(**OFFER, _p_side_truncated=True, prompt_token_ids=[1])).to_json()
    assert told == {**OFFER, "remote_block_ids": [[4]], "remote_num_tokens": 0}


def test_every_group_is_named() -> None:
    several = KVTransferParams(**OFFER | {"remote_block_ids": [[1, 2], [], [3]]})
    assert unwanted(several).remote_block_ids == [[1], [], [3]]


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
@pytest.mark.parametrize("value", [None, "absent"])
def test_nothing_is_said_unless_the_owner_is_named_in_full(key: str, value: object) -> None:
    params = {k: v for k, v in OFFER.items() if k != key} | ({} if value == "absent" else {key: value})
    with pytest.raises(WireError):
        unwanted(KVTransferParams(**params))


@pytest.mark.parametrize("blocks", [None, [], [[]], [[], []]])
def test_nothing_is_said_of_no_blocks(blocks: object) -> None:
    with pytest.raises(WireError):
        unwanted(KVTransferParams(**OFFER | {"remote_block_ids": blocks}))


@pytest.mark.parametrize(
    ("p", "d", "can"),
    [
        pytest.param(PULLS, VLLM, True, id="a pair that exchanges, and pulls"),
        pytest.param(VLLM, VLLM, False, id="not known to pull"),
        pytest.param(replace(PULLS, bidirectional=False), VLLM, False, id="does not pull"),
        pytest.param(replace(PULLS, block_size=16), VLLM, False, id="other blocks"),
        pytest.param(replace(PULLS, version="0.32.1"), replace(VLLM, version="0.32.1"), True, id="a patch release"),
        pytest.param(replace(PULLS, version="0.321.0"), replace(VLLM, version="0.321.0"), False, id="another release"),
        pytest.param(replace(PULLS, version="0.33.0"), replace(VLLM, version="0.33.0"), False, id="not proven there"),
        pytest.param(replace(PULLS, version=None), VLLM, False, id="version not known"),
        pytest.param(replace(PULLS, kind=None), replace(VLLM, kind=None), False, id="kind not known"),
        pytest.param(replace(PULLS, kind="backhaul"), replace(VLLM, kind="backhaul"), False, id="ours have a call"),
    ],
)
def test_who_tells_whom(p: Capabilities, d: Capabilities, can: bool) -> None:
    assert tells(p, d) is can

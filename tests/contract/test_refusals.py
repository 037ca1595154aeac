"""Legs that are refused before an engine sees them: whose blocks are let go, and whose are left for another try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.transport import Peer
from tests.unit.server.double import Stage, params_for_decode

REFUSED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1},
    "model": {"model": "nobody"},
    "length": {"messages": [{"role": "user", "content": "word " * 300}]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": "{"}}},
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
async def test_item_42_whatever_decode_refuses_a_leg_for_prefills_blocks_are_freed(
    tiny_model: Path, why: str, stream: bool
) -> None:
    params = params_for_decode()
    async with Stage(tiny_model, role="decode", kv=True) as decode:
        status, answer = await decode.chat(stream=stream, kv_transfer_params=params, **REFUSED[why])
        assert status == (404 if why == "model" else 400), answer
        owner = Peer(params["remote_engine_id"], params["remote_host"], params["remote_port"])
        assert decode.transport.released == [(owner, params["remote_request_id"])]
        assert decode.submitted == []


@pytest.mark.parametrize("why", REFUSED)
async def test_offer_given_to_a_prefill_that_refuses_the_leg_is_left_for_the_next(tiny_model: Path, why: str) -> None:
    """The conversation goes on when the client has put its mistake right; whoever made the offer is told nothing."""
    offer = params_for_decode(do_remote_decode=True, do_remote_prefill=False)
    async with Stage(tiny_model, role="prefill", kv=True) as prefill:
        status, _ = await prefill.chat(kv_transfer_params=offer, **REFUSED[why])
        assert status in (400, 404)
        assert prefill.transport.released == []
        assert prefill.submitted == []

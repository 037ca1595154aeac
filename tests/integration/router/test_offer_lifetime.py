"""An offer is not passed on once its engine may have let it go."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.router_harness import router_over, until
from tests.stub_engine import TEXT, StubEngine

SECONDS = 3.0


@pytest.mark.parametrize("shorter", ["the engine's", "the router's"])
async def test_next_turn_after_the_deadline_is_offered_nothing(redis_url: str, shorter: str) -> None:
    """Whichever ends first: what the engine says it keeps the blocks for, or what the router remembers them for."""
    offer_ttl, conversation_ttl = (SECONDS, 450.0) if shorter == "the engine's" else (480.0, SECONDS)
    settings: dict[str, Any] = {"kv_recompute_threshold": 2, "decode_only_tokens": 0}
    messages = [{"role": "user", "content": f"how long is {shorter} patience"}]
    follow_up = [{"role": "assistant", "content": TEXT}, {"role": "user", "content": "and then"}]
    explain = {"X-Backhaul-Explain": "1"}
    async with (
        StubEngine("prefill", tokenizes=True).running() as p,
        StubEngine("decode", tokenizes=True, offer_ttl=offer_ttl).running() as d,
        router_over([p], [d], redis_url, conversation_ttl=conversation_ttl, **settings) as front,
    ):
        await front.post({"model": "m", "messages": messages})
        messages += follow_up
        at_once = await front.post({"model": "m", "messages": messages}, headers=explain)
        assert at_once.explain["kv"] == "offered"
        assert "remote_block_ids" in p.bodies[-1]["kv_transfer_params"]
        if shorter == "the router's":
            assert SECONDS <= d.bodies[-1]["kv_transfer_params"]["remote_blocks_ttl"] < 1.1 * SECONDS
        end = time.monotonic() + SECONDS
        await until(lambda: time.monotonic() > end, "the second turn's offer has expired", 2 * SECONDS)
        messages += follow_up
        answer = await front.post({"model": "m", "messages": messages}, headers=explain)
        assert answer.text_of_whole == TEXT
        assert answer.explain["kv"] == "no_record"
        assert "remote_block_ids" not in p.bodies[-1]["kv_transfer_params"]

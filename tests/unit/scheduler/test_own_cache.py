"""Requests sent to a decode engine for what its prefix cache holds."""

from __future__ import annotations

import pytest

from connectors.fake import FakeNetwork
from connectors.wire.transfer import KVTransferParams
from tests.fake_engines import FakeEngine
from tests.fake_runner import BLOCK_SIZE, prompt_of

HISTORY = prompt_of(6 * BLOCK_SIZE + 1)


def alone(limit: int | None = None) -> KVTransferParams:
    return KVTransferParams.for_decode_alone(max_prefill_tokens=limit)


@pytest.fixture
def d() -> FakeEngine:
    return FakeEngine(network=FakeNetwork(), role="decode", num_blocks=32)


@pytest.mark.parametrize(("limit", "served"), [(9 + 1, True), (9, False), (0, False)])
def test_more_missing_than_allowed_is_refused(d: FakeEngine, limit: int, served: bool) -> None:
    d.submit(HISTORY, max_tokens=1, params=alone())
    d.run()
    request = d.submit([*HISTORY, *prompt_of(9, 5)], max_tokens=2, params=alone(limit))
    d.run()
    d.collect()
    final = d.final(request)
    assert (final.finish_reason, final.error_status) == (("length", 500) if served else ("error", 409))
    if not served:
        assert "10 of" in (final.error or "")
        assert not final.token_ids


def test_a_cache_that_loses_the_history_while_the_request_waits(d: FakeEngine) -> None:
    d.submit(HISTORY, max_tokens=1, params=alone())
    d.run()
    big = d.submit(prompt_of(28 * BLOCK_SIZE, 9), max_tokens=2 * BLOCK_SIZE)
    request = d.submit([*HISTORY, 3], max_tokens=2 * BLOCK_SIZE, params=alone(5))
    d.run()
    assert d.final(big).finish_reason == "length"
    assert (d.final(request).finish_reason, d.final(request).error_status) == ("error", 409)


def test_no_limit_means_no_refusal(d: FakeEngine) -> None:
    request = d.submit(HISTORY, max_tokens=1, params=alone())
    d.run()
    assert d.final(request).finish_reason == "length"

"""What of an offer serves a prompt."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.wire.transfer import KVTransferParams
from router.verify import common_prefix, verify

SIZE = 4


def offer(num_tokens: int, **changes: object) -> KVTransferParams:
    num_blocks = -(-num_tokens // SIZE)
    return KVTransferParams.parse(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": [[100 + block for block in range(num_blocks)]],
            "remote_block_hashes": [f"{block:02x}" for block in range(num_blocks)],
            "remote_num_tokens": num_tokens,
            "remote_engine_id": "d",
            "remote_request_id": "r",
            "remote_host": "h",
            "remote_port": 1,
            "remote_block_size": SIZE,
            "remote_blocks_expiry_time": 12.5,
            "remote_registration_generation": 3,
            **changes,
        }
    )


def ids(*values: int) -> array[int]:
    return array("I", values)


COMPUTED = ids(*range(1, 12))  # 11 tokens, of which the last has no KV
OFFER = offer(10)


@pytest.mark.parametrize(
    ("prompt", "num_known", "blocks", "num_tokens", "why"),
    [
        pytest.param([*range(1, 12), 50, 51], 10, [100, 101, 102], 10, "offered", id="goes on"),
        pytest.param([*range(1, 11), 50, 51], 10, [100, 101, 102], 10, "offered", id="last token differs, without KV"),
        pytest.param([*range(1, 10), 50, 51], 9, [100, 101], 8, "offered", id="cut within a block: whole blocks"),
        pytest.param([*range(1, 9), 50], 8, [100, 101], 8, "offered", id="cut at a block's edge"),
        pytest.param([*range(1, 6), 50], 5, [100], 4, "offered", id="one block"),
        pytest.param([*range(1, 6)], 4, [100], 4, "offered", id="shorter than what was computed"),
        pytest.param([1, 2, 3, 50], 3, None, None, "short", id="less than a pull is worth"),
        pytest.param([50, 2, 3], 0, None, None, "mismatch", id="nothing in common"),
        pytest.param([1], 0, None, None, "mismatch", id="nothing before the last token"),
        pytest.param([], 0, None, None, "mismatch", id="empty"),
    ],
)
def test_offer_is_cut_to_what_the_prompt_shares(
    prompt: list[int], num_known: int, blocks: list[int] | None, num_tokens: int | None, why: str
) -> None:
    found = verify(OFFER, COMPUTED, ids(*prompt), least=4, block_size=None)
    assert (found.num_known, found.why) == (num_known, why)
    if blocks is None:
        assert found.offer is None
        return
    assert found.offer is not None
    assert found.offer.remote_block_ids == [blocks]
    assert found.offer.remote_num_tokens == num_tokens
    assert len(found.offer.remote_block_hashes or ()) == len(blocks)
    kept = ("remote_blocks_expiry_time", "remote_registration_generation", "remote_request_id")
    assert all(getattr(found.offer, key) == getattr(OFFER, key) for key in kept)


def test_tokens_that_were_not_recorded_are_not_trusted() -> None:
    """An engine that hides its reasoning withholds ids: what it holds beyond the known ones may be anything."""
    found = verify(OFFER, COMPUTED[:6], ids(*range(1, 30)), least=0, block_size=None)
    assert found.offer is not None
    assert (found.num_known, found.offer.remote_num_tokens) == (6, 4)


@pytest.mark.parametrize(
    ("held", "configured", "why", "whole"),
    [
        pytest.param(offer(10, remote_block_ids=[[1, 2, 3], [7]]), None, "uncuttable", True, id="two groups"),
        pytest.param(offer(10).without("remote_block_size"), None, "uncuttable", True, id="block size unknown"),
        pytest.param(offer(10).without("remote_block_size"), 16, "mismatch", False, id="block size configured wrongly"),
        pytest.param(offer(10).without("remote_block_size"), SIZE, "offered", True, id="block size configured"),
    ],
)
def test_what_cannot_be_cut_is_used_whole_or_not_at_all(
    held: KVTransferParams, configured: int | None, why: str, whole: bool
) -> None:
    edited = ids(*range(1, 9), 99, 99, 99)
    assert verify(held, COMPUTED, edited, least=0, block_size=configured).why == why
    found = verify(held, COMPUTED, ids(*range(1, 12), 5), least=0, block_size=configured)
    assert found.offer == (held if whole else None)


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_offer_whose_counts_do_not_fit_is_not_used(num_blocks: int) -> None:
    """A reader that trims from the end of a list that is too long would take KV of other positions."""
    odd = offer(10, remote_block_ids=[list(range(num_blocks))])
    for prompt in (ids(*range(1, 12), 5), ids(*range(1, 9), 99)):
        assert verify(odd, COMPUTED, prompt, least=0, block_size=None).offer is None


SEQUENCES = st.lists(st.integers(0, 3), max_size=40)


@given(SEQUENCES, SEQUENCES, SEQUENCES)
def test_common_prefix_is_the_longest(shared: list[int], one: list[int], other: list[int]) -> None:
    a, b = shared + one, shared + other
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(array("I", a), array("I", b)) == expected


@given(SEQUENCES, SEQUENCES, st.integers(1, 40))
def test_never_more_than_the_true_common_prefix_is_offered(shared: list[int], rest: list[int], held: int) -> None:
    computed, prompt = array("I", [*shared, 7, 7, 7]), array("I", [*shared, *rest])
    found = verify(offer(held), computed, prompt, least=0, block_size=None)
    offered = found.offer.remote_num_tokens or 0 if found.offer else 0
    assert offered <= found.num_known <= min(held, common_prefix(computed, prompt))

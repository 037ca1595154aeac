from __future__ import annotations

import pytest

from engine.blocks import BlockPool


def names(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def filled(pool: BlockPool, *texts: str) -> list[int]:
    """A freed table whose blocks have these names."""
    block_ids = pool.allocate(len(texts))
    for block_id, name in zip(block_ids, names(*texts), strict=True):
        pool.cache(block_id, name)
    pool.free(block_ids)
    return block_ids


def test_match_finds_the_longest_prefix() -> None:
    pool = BlockPool(8)
    a, b, _ = filled(pool, "a", "b", "c")
    assert pool.match(names("a", "b", "x", "c")) == [a, b]
    assert pool.match(names("x", "a")) == []


def test_a_found_block_is_revived_with_its_content() -> None:
    pool = BlockPool(2)
    block_ids = filled(pool, "a", "b")
    assert pool.num_revived(block_ids) == 2
    pool.take(block_ids)
    assert (pool.num_free, pool.num_used, pool.usage) == (0, 2, 1.0)
    pool.take(block_ids[:1])
    pool.free(block_ids)
    assert pool.blocks[block_ids[0]].ref_count == 1
    assert pool.match(names("a", "b")) == block_ids


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    filled(pool, "a", "b", "c")
    pool.allocate(1)
    assert len(pool.match(names("a", "b", "c"))) == 2
    pool.allocate(1)
    assert len(pool.match(names("a", "b", "c"))) == 1
    assert pool.num_evictions == 2


def test_the_sequence_freed_first_is_evicted_first() -> None:
    pool = BlockPool(4)
    filled(pool, "a", "b")
    filled(pool, "x", "y")
    pool.allocate(2)
    assert pool.match(names("a")) == []
    assert len(pool.match(names("x", "y"))) == 2


def test_nameless_blocks_are_reused_before_anything_is_evicted() -> None:
    pool = BlockPool(4)
    filled(pool, "a", "b")
    nameless = pool.allocate(2)
    pool.free(nameless)
    assert set(pool.allocate(2)) == set(nameless)
    assert len(pool.match(names("a", "b"))) == 2


def test_the_same_content_twice_keeps_the_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, b"a")
    pool.cache(second, b"a")
    assert pool.match([b"a"]) == [first]
    assert pool.blocks[second].block_hash is None


def test_misuse_is_an_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="2 blocks wanted"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="named while free"):
        pool.cache(0, b"a")
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block_ids)


def test_idle_references_are_room_that_can_be_had() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    pool.idle(table)
    assert (pool.num_free, pool.num_idle, pool.num_available, pool.usage) == (1, 3, 4, 0.0)
    pool.pin(table)
    assert (pool.num_idle, pool.num_available, pool.usage) == (0, 1, 0.75)
    pool.free(table)
    assert (pool.num_free, pool.num_idle) == (4, 0)


def test_a_block_that_someone_uses_is_not_idle() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache(block, b"a")
    pool.idle([block])
    assert pool.num_revived([block]) == 1
    pool.take([block])
    assert (pool.num_idle, pool.num_revived([block])) == (0, 0)
    pool.free([block])
    assert (pool.num_idle, pool.blocks[block].ref_count) == (1, 1)
    pool.take([block])
    pool.idle([block])
    assert (pool.num_idle, pool.blocks[block].idle_count) == (1, 2), "on offer twice"
    for left in (1, 0):
        pool.pin([block])
        pool.free([block])
        assert pool.num_idle == left
    assert pool.num_free == 2


def test_idle_references_are_not_freed_by_mistake() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    with pytest.raises(AssertionError, match="no idle reference"):
        pool.pin(table)
    pool.idle(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)
    with pytest.raises(AssertionError, match="more idle references"):
        pool.idle(table)

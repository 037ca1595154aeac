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

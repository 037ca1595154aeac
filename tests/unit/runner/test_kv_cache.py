"""The KV arena and the name of its layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.kv_cache import KVCache, KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.float32)


def test_block_is_one_contiguous_piece_of_block_bytes() -> None:
    cache = KVCache(LAYOUT, 5)
    assert cache.arena.shape == (5, 3, 2, 2, 8, 16)
    assert cache.arena.is_contiguous()
    assert cache.arena[1].data_ptr() - cache.base_address == LAYOUT.block_bytes == 3 * 2 * 2 * 8 * 16 * 4


def test_arena_starts_zeroed_and_keeps_what_is_written() -> None:
    cache = KVCache(dataclasses.replace(LAYOUT, dtype=torch.bfloat16), 7)
    assert cache.arena.dtype == torch.bfloat16
    assert not cache.arena.any()
    cache.arena[6, 2, 1, 1, 7, 15] = 3.0
    assert cache.arena.sum() == 3.0


def test_fingerprint_is_the_same_for_the_same_layout_and_model() -> None:
    assert LAYOUT.fingerprint(b"m" * 16) == dataclasses.replace(LAYOUT).fingerprint(b"m" * 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 4),
        ("num_kv_heads", 1),
        ("head_dim", 32),
        ("block_size", 16),
        ("dtype", torch.bfloat16),
    ],
)
def test_fingerprint_changes_with_each_field(field: str, value: object) -> None:
    changed = dataclasses.replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    assert changed.fingerprint(b"m" * 16) != LAYOUT.fingerprint(b"m" * 16)


def test_every_field_is_covered_by_the_test_above() -> None:
    covered = {"num_layers", "num_kv_heads", "head_dim", "block_size", "dtype"}
    assert {field.name for field in dataclasses.fields(KVLayout)} == covered


def test_fingerprint_changes_with_the_model() -> None:
    assert LAYOUT.fingerprint(b"m" * 16) != LAYOUT.fingerprint(b"n" * 16)


def test_fingerprint_tells_swapped_dimensions_apart() -> None:
    one = dataclasses.replace(LAYOUT, num_layers=2, num_kv_heads=3)
    assert one.block_bytes == LAYOUT.block_bytes
    assert one.fingerprint(b"m" * 16) != LAYOUT.fingerprint(b"m" * 16)

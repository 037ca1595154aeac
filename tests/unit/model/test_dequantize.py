"""Each block format against the gguf library's own arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from engine.model.dequantize import _CHUNK, BLOCK, SUPPORTED, dequantize


def _raw(kind: str, shape: tuple[int, int]) -> np.ndarray:
    values = np.random.default_rng(0).normal(scale=3.0, size=shape).astype(np.float32)
    return gguf.quants.quantize(values, GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_format_equals_the_reference_bit_for_bit(kind: str) -> None:
    raw = _raw(kind, (48, 96))
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType[kind])

    values = dequantize(torch.from_numpy(raw.view(np.uint8).reshape(-1)), kind, (48, 96), torch.float32)

    assert values.dtype == torch.float32
    assert np.array_equal(values.numpy(), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_random_bytes_equal_the_reference(kind: str) -> None:
    """Every bit pattern of the stored values, and scales of any sign and size."""
    block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    raw = np.random.default_rng(1).integers(0, 256, size=(64, 4 * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some scales are infinite or no number, and warn
        expected = gguf.quants.dequantize(raw, GGMLQuantizationType[kind])

    values = dequantize(torch.from_numpy(raw.reshape(-1)), kind, (64, 128), torch.float32)

    assert np.array_equal(values.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_narrow_results_are_rounded_once_from_float32(kind: str, dtype: torch.dtype) -> None:
    raw = torch.from_numpy(_raw(kind, (32, 64)).view(np.uint8).reshape(-1))

    values = dequantize(raw, kind, (32, 64), dtype)

    assert torch.equal(values, dequantize(raw, kind, (32, 64), torch.float32).to(dtype))


@pytest.mark.parametrize("num_blocks", [1, _CHUNK - 1, _CHUNK, _CHUNK + 1, 2 * _CHUNK + 3])
def test_chunk_edges_lose_nothing(num_blocks: int) -> None:
    raw = _raw("Q4_1", (1, num_blocks * BLOCK))
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType.Q4_1)

    values = dequantize(torch.from_numpy(raw.reshape(-1)), "Q4_1", (1, num_blocks * BLOCK), torch.float32)

    assert np.array_equal(values.numpy(), expected)


def test_plain_formats_are_copied() -> None:
    raw = torch.zeros(16, dtype=torch.uint8)
    values = dequantize(raw, "F32", (4,), torch.float32)
    raw.fill_(255)
    assert values.tolist() == [0.0] * 4

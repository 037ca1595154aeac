"""Each block format against the gguf library's own arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from engine.model.dequantize import _CHUNK, BLOCK, SUPPORTED, as_stored, dequantize
from engine.model.quantized import Quantized


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


def _values(quantized: Quantized) -> torch.Tensor:
    """What the fields of a Quantized are documented to mean."""
    rows, num_blocks = quantized.scales.shape
    stored = quantized.stored.reshape(rows, num_blocks, -1)
    stored = torch.cat((stored & 15, stored >> 4), -1) if quantized.bits == 4 else stored.view(torch.int8)
    values = stored * quantized.scales[..., None]
    if quantized.offsets is not None:
        values = values + quantized.offsets[..., None]
    return values.view(rows, -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_stored_form_has_the_same_values_bit_for_bit(kind: str) -> None:
    raw = torch.from_numpy(_raw(kind, (48, 96)).view(np.uint8).reshape(-1))

    stored = as_stored(raw, kind, (48, 96))

    assert stored is not None
    assert stored.bits == int(kind[1])
    assert torch.equal(_values(stored), dequantize(raw, kind, (48, 96), torch.float32))
    backwards = stored.reordered(lambda rows: rows.flip(0))
    assert torch.equal(_values(backwards), _values(stored).flip(0))


def test_plain_and_one_dimensional_tensors_have_no_stored_form() -> None:
    assert as_stored(torch.zeros(16, dtype=torch.uint8), "F32", (2, 2)) is None
    assert as_stored(torch.zeros(34, dtype=torch.uint8), "Q8_0", (32,)) is None


def test_plain_formats_are_copied() -> None:
    raw = torch.zeros(16, dtype=torch.uint8)
    values = dequantize(raw, "F32", (4,), torch.float32)
    raw.fill_(255)
    assert values.tolist() == [0.0] * 4

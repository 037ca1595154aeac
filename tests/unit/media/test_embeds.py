"""Encodings that clients bring: what is read is a plain tensor of the right shape, or one error."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.media.embeds import read_embeds
from engine.media.errors import MediaError


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 8), (2, 16, 8)])
def test_a_tensor_is_read_as_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = read_embeds(saved(value), width=8, max_rows=32)
    assert torch.equal(rows, value.reshape(32, 8))


def test_a_view_of_more_is_read_as_what_it_shows() -> None:
    rows = read_embeds(saved(torch.ones(1, 8).expand(16, 8)), width=8, max_rows=32)
    assert (rows.shape, rows.untyped_storage().nbytes()) == ((16, 8), 16 * 8 * 4)


def with_pickle(payload: bytes) -> bytes:
    """A file as torch.save writes one, with another pickle in it."""
    whole, buffer = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(16, 8)))), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for entry in whole.infolist():
            data = payload if entry.filename.endswith("data.pkl") else whole.read(entry)
            archive.writestr(entry.filename, data)
    return buffer.getvalue()


def zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(50 << 20))
    return buffer.getvalue()


HUGE = torch.ones(1, 8).expand(1 << 40, 8)
WRONG = {
    "empty": b"",
    "text": b"no tensor",
    "pickle": pickle.dumps([1, 2]),
    "code": with_pickle(b"cos\nsystem\n(S'false'\ntR."),
    "old format": saved(torch.zeros(16, 8), _use_new_zipfile_serialization=False),
    "zip bomb": zip_bomb(),
    "list": saved([torch.zeros(16, 8)]),
    "width": saved(torch.zeros(16, 9)),
    "one dimension": saved(torch.zeros(8)),
    "four dimensions": saved(torch.zeros(1, 1, 16, 8)),
    "no rows": saved(torch.zeros(0, 8)),
    "too many rows": saved(torch.zeros(33, 8)),
    "huge": saved(HUGE),
    "whole numbers": saved(torch.zeros(16, 8, dtype=torch.int64)),
    "double": saved(torch.zeros(16, 8, dtype=torch.float64)),
    "sparse": saved(torch.zeros(16, 8).to_sparse()),
    "not finite": saved(torch.full((16, 8), float("nan"))),
    "infinite": saved(torch.full((16, 8), float("inf"))),
    "on no device": saved(torch.zeros(16, 8, device="meta")),
    "truncated": saved(torch.zeros(16, 8))[:-100],
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_anything_else_is_one_error(data: bytes) -> None:
    with pytest.raises(MediaError) as raised:
        read_embeds(data, width=8, max_rows=32)
    assert len(str(raised.value).splitlines()) == 1


def test_a_parameter_is_no_tensor_to_keep() -> None:
    """Subclasses may do anything when they are used."""
    value: Tensor = torch.nn.Parameter(torch.zeros(16, 8))
    with pytest.raises(MediaError, match="dense tensor"):
        read_embeds(saved(value), width=8, max_rows=32)

"""Encodings that clients bring: a tensor as torch.save writes one, in base64. Only where the operator takes them."""

from __future__ import annotations

import io
import zipfile

import torch
from torch import Tensor

from engine.media.errors import MediaError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_embeds(data: bytes, *, width: int, max_rows: int) -> Tensor:
    """[rows, width], of the given [rows, width] or [tiles, rows, width]. Raises MediaError."""
    _check_size(data, 4 * width * max_rows + (1 << 16))
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # whatever the unpickler comes across in bytes that anybody made
        raise MediaError("not a tensor as torch.save writes it") from None
    # What it says of itself first: a few stored values can stand for a tensor of any size.
    plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    if not plain or value.dtype not in DTYPES:
        raise MediaError("a dense tensor of float32, float16 or bfloat16 expected")
    if value.dim() not in (2, 3) or value.shape[-1] != width:
        raise MediaError(f"a shape [rows, {width}] or [tiles, rows, {width}] expected, got {list(value.shape)[:8]}")
    num_rows = value.shape[0] if value.dim() == 2 else value.shape[0] * value.shape[1]
    if not 0 < num_rows <= max_rows:
        raise MediaError(f"1 to {max_rows} rows expected, got {num_rows}")
    if not bool(value.isfinite().all()):
        raise MediaError("the values are not all finite")
    # Of memory of its own: the given one may be a view of more.
    rows: Tensor = value.detach().reshape(num_rows, width).clone(memory_format=torch.contiguous_format)
    return rows


def _check_size(data: bytes, limit: int) -> None:
    """What the file is said to hold once it is unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError):
        raise MediaError("not a tensor as torch.save writes it") from None
    if size > limit:
        raise MediaError(f"{size} bytes are more than the encoding of a picture has")

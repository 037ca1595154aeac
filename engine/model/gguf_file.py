"""The GGUF container: metadata and where each tensor's bytes are.

The gguf library's own reader makes a numpy view of every token string, which takes seconds and hundreds of megabytes,
and follows a corrupt count until memory ends. This one checks every length against the file first.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from engine.model.errors import ModelError

Metadata = dict[str, object]
"""Scalars and strings as such, arrays of strings as list[str], other arrays as numpy arrays."""

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_STRINGS = 1 << 22
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    shape: tuple[int, ...]
    """Slowest dimension first, as torch counts; the file has them the other way round."""
    kind: str
    """GGML's name of the number format."""
    start: int
    """Byte in the file."""
    num_bytes: int


class GGUFFile:
    """An opened file. Bytes are mapped, not read; raises ModelError for anything but a whole, consistent GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Copy-on-write only so that torch takes views of it without a warning; nothing writes.
            self.bytes: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="c")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ModelError(f"{path} is empty") from None
        header = _Header(path, self.bytes)
        num_tensors = header.begin()
        self.metadata: Metadata = header.metadata
        self.tensors = header.tensors(num_tensors)

    def tensor_bytes(self, entry: TensorEntry) -> NDArray[np.uint8]:
        return self.bytes[entry.start : entry.start + entry.num_bytes]


class _Header:
    """A cursor over the file's start."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.data = memoryview(data.data)
        self.position = 0
        self.metadata: Metadata = {}

    def begin(self) -> int:
        """Read up to the end of the metadata; returns the number of tensors."""
        if bytes(self.data[:4]) != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file (a Hugging Face model is given by its folder)")
        self.take(4)
        version = self.u32()
        if version & 0xFFFF == 0:
            raise ModelError(f"{self.path}: big-endian GGUF files are not supported")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (supported: 2, 3)")
        num_tensors, num_keys = self.u64(), self.u64()
        for _ in range(num_keys):
            key = self.string()
            if key in self.metadata:
                raise self.corrupt(f"metadata key {key[:60]!r} appears twice")
            self.metadata[key] = self.value(key)
        return num_tensors

    def tensors(self, count: int) -> dict[str, TensorEntry]:
        described = {}
        for _ in range(count):
            name = self.string()
            if name in described:
                raise self.corrupt(f"tensor {name[:60]!r} appears twice")
            num_dimensions = self.u32()
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise self.corrupt(f"tensor {name[:60]!r} has {num_dimensions} dimensions")
            shape = tuple(self.u64() for _ in range(num_dimensions))[::-1]
            described[name] = (shape, self.u32(), self.u64())
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.corrupt("general.alignment is not a power of two")
        data_start = -(-self.position // alignment) * alignment
        return {name: self.entry(name, *description, data_start) for name, description in described.items()}

    def entry(self, name: str, shape: tuple[int, ...], code: int, offset: int, data_start: int) -> TensorEntry:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name[:60]!r} has the unknown type {code}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block or 0 in shape:
            raise self.corrupt(f"tensor {name[:60]!r} of type {kind.name} has the impossible shape {list(shape)}")
        num_bytes = math.prod(shape) // block * block_bytes
        start = data_start + offset
        if start + num_bytes > len(self.data):
            raise ModelError(f"{self.path} is truncated: tensor {name[:60]!r} ends beyond the file; download it again")
        return TensorEntry(shape, kind.name, start, num_bytes)

    def value(self, key: str) -> object:
        kind = self.value_type(key)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self.array(key)
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def array(self, key: str) -> object:
        kind, count = self.value_type(key), self.u64()
        if kind == GGUFValueType.ARRAY:
            raise ModelError(f"{self.path}: metadata key {key[:60]!r} nests arrays, which is not supported")
        if kind != GGUFValueType.STRING:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if count > _MAX_STRINGS:
            raise self.corrupt(f"metadata key {key[:60]!r} announces {count} strings")
        return [self.string() for _ in range(count)]

    def value_type(self, key: str) -> GGUFValueType:
        code = self.u32()
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self.corrupt(f"metadata key {key[:60]!r} has the unknown type {code}") from None

    def string(self) -> str:
        try:
            return str(self.take(self.u64()), "utf-8")
        except UnicodeDecodeError:
            raise self.corrupt("a string is not UTF-8") from None

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self.data):
            raise ModelError(f"{self.path} is truncated or corrupt: it ends within its header; download it again")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is corrupt: {what}")

"""Compressed answers."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from router.client_coding import MAX_PART_BYTES, Decoder, decoder_for
from router.client_protocol import ProtocolError

TEXT = b"All work and no play. " * 5000


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def decoder(coding: str) -> Decoder:
    made, _ = decoder_for(headers(coding))
    assert made is not None
    return made


def headers(*codings: str) -> CIMultiDictProxy[str]:
    given = CIMultiDict([("Content-Encoding", coding) for coding in codings])
    given.extend({"Content-Length": "9", "X-A": "1"})
    return CIMultiDictProxy(given)


def unpacked(one: Decoder, *parts: bytes) -> Iterator[bytes]:
    for part in parts:
        one.feed(part)
        while plain := one.take():
            yield plain
    one.end()


@pytest.mark.parametrize(
    ("coding", "pack"),
    [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)],
)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_unpacked_however_it_is_cut(coding: str, pack: Callable[[bytes], bytes], step: int) -> None:
    data = pack(TEXT)
    parts = [data[start : start + step] for start in range(0, len(data), step)]
    assert b"".join(unpacked(decoder(coding), *parts)) == TEXT


def test_event_is_unpacked_as_soon_as_it_is_there() -> None:
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    one = decoder("gzip")
    for event in (b"data: 1\n\n", b"data: 2\n\n"):
        one.feed(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH))
        assert one.take() == event
        assert one.take() == b""


@pytest.mark.parametrize("size", [MAX_PART_BYTES - 1, MAX_PART_BYTES, MAX_PART_BYTES + 1, 64 << 20])
def test_never_much_at_a_time(size: int) -> None:
    sizes = [len(part) for part in unpacked(decoder("gzip"), gzip.compress(bytes(size)))]
    assert sum(sizes) == size
    assert max(sizes) <= MAX_PART_BYTES


def test_end_is_seen_wherever_a_part_ends() -> None:
    for size in range(MAX_PART_BYTES, MAX_PART_BYTES + 300):
        assert sum(map(len, unpacked(decoder("deflate"), raw_deflate(bytes(size))))) == size


@pytest.mark.parametrize(
    "data",
    [b"not compressed at all", gzip.compress(TEXT)[:-9], gzip.compress(TEXT)[:5], gzip.compress(TEXT) + b"more"],
    ids=["text", "cut", "cut in the head", "more"],
)
def test_broken(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(unpacked(decoder("gzip"), data))


def test_nothing_is_nothing() -> None:
    assert list(unpacked(decoder("gzip"))) == []


@pytest.mark.parametrize("codings", [("br",), ("gzip, gzip",), ("gzip", "deflate")])
def test_unknown_coding(codings: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError):
        decoder_for(headers(*codings))


def test_headers_are_true_of_what_is_unpacked() -> None:
    assert dict(decoder_for(headers("gzip"))[1]) == {"X-A": "1"}
    made, left = decoder_for(headers("identity"))
    assert made is None
    assert dict(left) == {"Content-Length": "9", "X-A": "1"}

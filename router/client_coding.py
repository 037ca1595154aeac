"""Answers that come compressed, unpacked as they come and never much at a time."""

from __future__ import annotations

import zlib
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from router.client_protocol import ProtocolError

MAX_PART_BYTES: Final = 256 << 10
GZIP: Final = 16 + zlib.MAX_WBITS


class Decoder:
    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._unpacker: zlib._Decompress | None = None
        self._data = b""
        """Not yet unpacked."""
        self._may_hold_more = False

    def feed(self, data: bytes) -> None:
        self._data += data

    def take(self) -> bytes:
        """Some of what can be unpacked now; b"" if more must be fed first. Raises ProtocolError."""
        while self._data or self._may_hold_more:
            unpacker = self._unpacker
            if unpacker is None:
                unpacker = self._unpacker = zlib.decompressobj(self._window())
            if unpacker.eof:
                raise ProtocolError("something follows the compressed body")
            try:
                plain = unpacker.decompress(self._data, MAX_PART_BYTES)
            except zlib.error as error:
                raise ProtocolError(f"not decompressed: {error}") from None
            self._data = unpacker.unconsumed_tail or unpacker.unused_data
            self._may_hold_more = len(plain) == MAX_PART_BYTES and not unpacker.eof
            if plain:
                return plain
        return b""

    def end(self) -> None:
        """All has been fed and taken. Raises ProtocolError if that is not the end of it."""
        if self._unpacker is not None and not self._unpacker.eof:
            raise ProtocolError("the compressed body ends too early")

    def _window(self) -> int:
        """How zlib is told what to expect: some servers send "deflate" without the header that it ought to have."""
        if self._gzip:
            return GZIP
        return zlib.MAX_WBITS if self._data[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS


def decoder_for(headers: CIMultiDictProxy[str]) -> tuple[Decoder | None, CIMultiDictProxy[str]]:
    """What unpacks the body, and the headers that are true of it then. Raises ProtocolError for an unknown coding."""
    codings = [one.strip().lower() for value in headers.getall("Content-Encoding") for one in value.split(",")]
    plain = CIMultiDict(headers)
    del plain["Content-Encoding"]
    codings = [one for one in codings if one not in ("", "identity")]
    if not codings:
        return None, CIMultiDictProxy(plain)
    if len(codings) > 1 or codings[0] not in ("gzip", "x-gzip", "deflate"):
        raise ProtocolError("a content coding that is not known here")
    plain.pop("Content-Length", None)
    return Decoder(gzip=codings[0] != "deflate"), CIMultiDictProxy(plain)

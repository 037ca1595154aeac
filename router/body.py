"""Request bodies: read within a time and a size, decompressed within the same size, parsed."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, Final

import orjson
from aiohttp import web

from connectors.wire.openai import APIError, bad_request

BODY_SECONDS: Final = 300.0
_EITHER_HEADER: Final = 32 + zlib.MAX_WBITS  # gzip or zlib, told by its first bytes


async def read_object(request: web.BaseRequest, limit: int) -> dict[str, Any]:
    """The JSON object of a request. Raises APIError; 413 beyond `limit` bytes."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise APIError(415, f"Content-Encoding {encoding} is not understood here; send gzip, deflate or none.")
    try:
        if request.content.is_eof():  # all of it is here, as small ones are
            data: bytearray | bytes = request.content.read_nowait()
            if len(data) > limit:
                raise _too_large(limit)
        else:
            async with asyncio.timeout(BODY_SECONDS):
                data = await _read(request, limit)
    except TimeoutError:
        raise APIError(408, f"The request body did not arrive within {BODY_SECONDS:.0f} s.") from None
    except web.RequestPayloadError as error:
        raise bad_request(f"The request body cannot be read: {error}") from None
    if encoding != "identity":
        data = await asyncio.to_thread(_unpack, data, limit)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("The request body must be a JSON object.")
    return body


async def _read(request: web.BaseRequest, limit: int) -> bytearray | bytes:
    """The body as sent. Not `request.read()`, which keeps a copy until the request is answered."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    data = bytearray()
    async for part in request.content.iter_any():
        data += part
        if len(data) > limit:
            raise _too_large(limit)
    return data


def _unpack(data: bytearray | bytes, limit: int) -> bytes:
    unpacker = zlib.decompressobj(_EITHER_HEADER)
    try:
        plain = unpacker.decompress(data, limit + 1)
    except zlib.error as error:
        raise bad_request(f"The request body cannot be decompressed: {error}") from None
    if len(plain) > limit:
        raise _too_large(limit)
    if not unpacker.eof:
        raise bad_request("The request body cannot be decompressed: it ends too early.")
    if unpacker.unused_data:
        raise bad_request("The request body cannot be decompressed: something follows its end.")
    return plain


def _too_large(limit: int) -> APIError:
    return APIError(413, f"The request body is larger than {limit} bytes.")

"""A good answer in one piece, sent in one go."""

from __future__ import annotations

from aiohttp import HttpVersion10, hdrs, web
from aiohttp.helpers import rfc822_formatted_time

from router.client import header_lines


class WholeResponse(web.StreamResponse):
    """What `web.Response` is, of bytes and with status 200: without its readiness for other bodies, for compression and
    for cookies, which costs more than the answer."""

    def __init__(self, headers: list[tuple[str, str]], body: bytes) -> None:
        super().__init__(headers=headers)
        self._whole = body
        self._has_begun = False

    @property
    def prepared(self) -> bool:
        return self._has_begun

    async def prepare(self, request: web.BaseRequest) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        headers, version = self.headers, request.version
        headers[hdrs.CONTENT_LENGTH] = str(len(self._whole))
        headers[hdrs.DATE] = rfc822_formatted_time()
        if not self._keep_alive:
            headers[hdrs.CONNECTION] = "close"
        elif version == HttpVersion10:
            headers[hdrs.CONNECTION] = "keep-alive"
        head = f"HTTP/{version.major}.{version.minor} 200 OK\r\n{header_lines(headers.items())}\r\n"
        await request.writer.write(head.encode("utf-8", "surrogateescape") + self._whole)

    async def write_eof(self, data: bytes = b"") -> None:
        """All of it has been written."""

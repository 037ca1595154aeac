"""The status page: files beside this one, served as they are to operators. All of it is here, so it works offline; what
it shows it fetches from /admin/status."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Final

from aiohttp import web

from router.context import Request, Router
from router.front import Handler

FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/chart.js": ("chart.js", "text/javascript"),
    "/page/views.js": ("views.js", "text/javascript"),
    "/page/format.js": ("format.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""By path."""
HEADERS: Final = {
    # Nothing from elsewhere, nothing inline, and in nobody's frame: what an engine calls itself stays text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def routes() -> Iterator[tuple[str, Handler]]:
    """Path and handler of each file."""
    for path, (name, kind) in FILES.items():
        yield path, _serving((files(__package__) / name).read_bytes(), kind)


def _serving(body: bytes, kind: str) -> Handler:
    async def serve(_: Router, __: Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return serve

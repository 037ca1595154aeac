"""What comes to a port, and which handler it is for: by method and path, as routes say.

Errors leave as OpenAI error bodies, and every response has the headers that all have.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NamedTuple

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from connectors.wire.openai import APIError, error_body
from router import jsontext
from router.context import Request, Router, finish_headers
from router.headers import request_id

Handler = Callable[[Router, Request], Awaitable[web.StreamResponse]]

ANY: Final = "*"
_PLACE: Final = re.compile(r"\{\w+(|:\.\+)\}")

log = logging.getLogger("router")


class Route(NamedTuple):
    method: str
    """With GET comes HEAD; ANY are all that have no route of their own there."""
    path: str
    """`{name}` stands for a part of it, `{name:.+}` for all that follows."""
    handler: Handler


class Front:
    """The server of a port. aiohttp's own applications look for much that we do not have, at every request."""

    def __init__(self, router: Router, routes: Iterable[Route]) -> None:
        """Where several paths match, one without a pattern goes first, then what comes first."""
        self._router = router
        self._plain: dict[tuple[str, str], Handler] = {}
        by_path: dict[str, dict[str, Handler]] = {}
        for method, path, handler in routes:
            for one in ("GET", "HEAD") if method == "GET" else (method,):
                by_path.setdefault(path, {})[one] = handler
                self._plain[one, path] = handler
        in_order = sorted(by_path.items(), key=lambda item: "{" in item[0])
        self._all = [(_pattern(path), methods) for path, methods in in_order]

    def runner(self, *, shutdown_timeout: float, handler_cancellation: bool = False) -> web.ServerRunner:
        """For sites to listen."""
        loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Request:
            return Request(message, payload, protocol, writer, task, loop)

        server = _Server(
            self.handle,  # type: ignore[arg-type]  # it is typed as if there were one kind of request
            request_factory=request,
            handler_cancellation=handler_cancellation,
            auto_decompress=False,  # its refusal of an unknown encoding could not be ours
            access_log=None,
        )
        return web.ServerRunner(server, shutdown_timeout=shutdown_timeout)

    async def handle(self, request: Request) -> web.StreamResponse:
        request.id = request_id(request.headers)
        try:
            if "Expect" in request.headers:
                await _go_on(request)
            response = await self._handler(request)(self._router, request)
        except Exception as error:
            response = told(request, error)
        if not response.prepared:  # else it has been sent, and has them
            finish_headers(self._router, request, response)
        return response

    def _handler(self, request: Request) -> Handler:
        """Raises web.HTTPException: there is no such path, or it takes other methods."""
        method, path = request.method, request.rel_url.path_safe
        if handler := self._plain.get((method, path)):
            return handler
        allowed: set[str] = set()
        for pattern, methods in self._all:
            if pattern.fullmatch(path):
                if handler := methods.get(method) or methods.get(ANY):
                    return handler
                allowed |= methods.keys()
        if allowed:
            raise web.HTTPMethodNotAllowed(method, sorted(allowed))
        raise web.HTTPNotFound


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP gets an answer in the shape of all errors. aiohttp's own message quotes what was sent."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        text = "The request is not valid HTTP, or its headers are too long."
        response = json_error(status, error_body(text, type="BadRequestError", code=status), {"Server": "backhaul"})
        response.force_close()
        return response


def told(request: Request, error: Exception) -> web.Response:
    """What the client gets to know of an error."""
    match error:
        case APIError():
            return json_error(error.status, error.body(), error.headers)
        case web.HTTPException():
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            message = f"{error.reason}: {request.method} {request.path}"
            kind = "NotFoundError" if error.status == 404 else "BadRequestError"
            return json_error(error.status, error_body(message, type=kind, code=error.status), headers)
        case ConnectionResetError():
            return web.Response()  # nobody will get it: the client has left, which is no error of ours
    log.error("a handler failed", exc_info=error, extra={"request_id": request.id})
    return json_error(500, error_body("Internal error of the router.", type="InternalServerError", code=500))


def json_error(status: int, body: dict[str, object], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=jsontext.dumps(body), content_type="application/json", headers=headers)


def _pattern(path: str) -> re.Pattern[str]:
    """Of the paths that a route's path stands for."""
    parts = enumerate(_PLACE.split(path))  # in turns: what stands there as it is, and the end of a place
    return re.compile("".join([re.escape(part) if i % 2 == 0 else ".+" if part else "[^/]+" for i, part in parts]))


async def _go_on(request: Request) -> None:
    """The client waits to be told that its body is wanted. Raises web.HTTPException."""
    if request.version != HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # of the response nothing has been sent

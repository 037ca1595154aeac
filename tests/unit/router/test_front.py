"""Requests find their handlers, whatever comes with them, and answers in one piece are what HTTP says they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from connectors.wire.openai import bad_request
from router.context import Request, Router
from router.front import ANY, Front, Route
from router.whole import WholeResponse
from tests.router_harness import listening

BIG = b"x" * (1 << 20)


async def one(_: Router, request: Request) -> web.StreamResponse:
    return web.json_response({"one": request.path})


async def some(_: Router, request: Request) -> web.StreamResponse:
    return web.json_response({"some": request.path})


async def whole(_: Router, request: Request) -> web.StreamResponse:
    return WholeResponse(
        [("Content-Type", "text/plain"), ("X-Twice", "1"), ("X-Twice", "2")], await request.content.read()
    )


async def refused(_: Router, __: Request) -> web.StreamResponse:
    raise bad_request("no", param="it")


async def broken(_: Router, __: Request) -> web.StreamResponse:
    raise RuntimeError("secret")


ROUTES = [
    Route("GET", "/one", one),
    Route("POST", "/one/{id}/end", one),
    Route("GET", "/one/{name:.+}", one),
    Route(ANY, "/{rest:.+}", some),
]
STRICT = [
    Route("GET", "/one", one),
    Route("POST", "/whole", whole),
    Route("POST", "/refused", refused),
    Route("POST", "/broken", broken),
]


@asynccontextmanager
async def serving(routes: list[Route], *, draining: bool = False) -> AsyncIterator[int]:
    front = Front(cast(Router, SimpleNamespace(draining=draining)), routes)
    async with listening(front.runner(shutdown_timeout=0.1)) as url:
        yield int(url.rsplit(":", 1)[1])


class Answer:
    def __init__(self, head: bytes) -> None:
        self.line, *lines = head.decode().rstrip("\r\n").split("\r\n")
        self.headers = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines)]
        self.body = b""

    def get(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


async def answers(port: int, *requests: bytes) -> list[Answer]:
    """To requests that are sent on one connection, one after the other's answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        found = []
        for request in requests:
            writer.write(request)
            found.append(answer := Answer(await reader.readuntil(b"\r\n\r\n")))
            if answer.line.split()[1] != "100" and not request.startswith(b"HEAD"):
                answer.body = await reader.readexactly(int(answer.get("content-length")[0]))
        return found
    finally:
        writer.close()


def request(line: str, *headers: str, body: bytes = b"", version: str = "1.1") -> bytes:
    lines = [f"{line} HTTP/{version}", "Host: here", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("GET /one", {"one": "/one"}),
        ("GET /one?a=b", {"one": "/one"}),
        ("GET /%6fne", {"one": "/one"}),
        ("POST /one/7/end", {"one": "/one/7/end"}),
        ("GET /one/a/b", {"one": "/one/a/b"}),
        ("GET /one/7/end", {"one": "/one/7/end"}),
        ("POST /one/7/8/end", {"some": "/one/7/8/end"}),
        ("POST /one", {"some": "/one"}),
        ("DELETE /else/where", {"some": "/else/where"}),
        ("GET /one%2Fa", {"some": "/one/a"}),
    ],
)
async def test_handler_is_found_by_method_and_path(line: str, found: dict[str, str]) -> None:
    async with serving(ROUTES) as port:
        [answer] = await answers(port, request(line))
    assert (answer.line, json.loads(answer.body)) == ("HTTP/1.1 200 OK", found)


@pytest.mark.parametrize(
    ("line", "status", "allow"),
    [
        ("POST /one", 405, ["GET,HEAD"]),
        ("OPTIONS /whole", 405, ["POST"]),
        ("HEAD /whole", 405, ["POST"]),
        ("GET /nothing", 404, []),
        ("OPTIONS *", 404, []),
        ("POST /refused", 400, []),
    ],
)
async def test_what_cannot_be_answered_is_told_in_the_shape_of_errors(line: str, status: int, allow: list[str]) -> None:
    async with serving(STRICT) as port:
        [answer] = await answers(port, request(line, "X-Request-Id: mine"))
    assert (int(answer.line.split()[1]), answer.get("allow")) == (status, allow)
    assert (answer.get("x-request-id"), answer.get("server")) == (["mine"], ["backhaul"])
    if not line.startswith("HEAD"):
        assert json.loads(answer.body)["error"]["code"] in (status, None)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /\xff HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\rsecret\r\n\r\n",
        b"secret\r\n\r\n",
        b"POST /one HTTP/1.1\r\nHost: here\r\nContent-Length: secret\r\n\r\n",
        b"GET /one HTTP/1.1\r\nHost: here\r\nX: " + b"secret" * 5000 + b"\r\n\r\n",
    ],
    ids=["path", "header", "nonsense", "length", "long"],
)
async def test_what_is_no_http_is_told_so_in_the_shape_of_errors(sent: bytes) -> None:
    async with serving(STRICT) as port:
        [answer] = await answers(port, sent)
        assert answer.line == "HTTP/1.0 400 Bad Request", "nothing says that the client speaks 1.1"
        assert answer.get("content-type") == ["application/json"]
        error = json.loads(answer.body)["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert b"secret" not in answer.body
        [good] = await answers(port, request("GET /one"))
        assert good.line == "HTTP/1.1 200 OK"


async def test_head_is_answered_as_get_without_a_body() -> None:
    async with serving(STRICT) as port:
        head, get = await answers(port, request("HEAD /one"), request("GET /one"))
    assert (head.line, head.get("content-length")) == (get.line, get.get("content-length"))


async def test_handler_that_fails_says_nothing_of_why() -> None:
    async with serving(STRICT) as port:
        [answer] = await answers(port, request("POST /broken"))
    assert answer.line.split()[1] == "500"
    assert b"secret" not in answer.body


@pytest.mark.parametrize(("expect", "status"), [("100-continue", "100"), ("100-Continue", "100"), ("more", "417")])
async def test_client_that_waits_to_send_its_body_is_told(expect: str, status: str) -> None:
    head = f"POST /whole HTTP/1.1\r\nHost: here\r\nExpect: {expect}\r\nContent-Length: 2\r\n\r\n".encode()
    async with serving(STRICT) as port:
        if status == "417":
            [answer] = await answers(port, head)
        else:
            answer, after = await answers(port, head, b"ok")
            assert (after.line, after.body) == ("HTTP/1.1 200 OK", b"ok")
    assert answer.line.split()[1] == status


async def test_answer_in_one_piece_has_what_every_answer_has() -> None:
    async with serving(STRICT) as port:
        sent = [request("POST /whole", "X-Request-Id: mine", body=body) for body in (b"ab", b"", BIG)]
        found = await answers(port, *sent)
    assert [answer.body for answer in found] == [b"ab", b"", BIG]
    for answer in found:
        assert answer.line == "HTTP/1.1 200 OK"
        assert (answer.get("x-request-id"), answer.get("server")) == (["mine"], ["backhaul"])
        assert (answer.get("content-type"), answer.get("x-twice")) == (["text/plain"], ["1", "2"])
        assert answer.get("connection") == []
        assert parsedate_to_datetime(answer.get("date")[0]).tzinfo is not None


@pytest.mark.parametrize(
    ("version", "headers", "connection"),
    [
        ("1.1", ["Connection: close"], ["close"]),
        ("1.0", ["Connection: keep-alive"], ["keep-alive"]),
        ("1.0", [], ["close"]),
    ],
)
async def test_answer_in_one_piece_says_whether_the_connection_stays(
    version: str, headers: list[str], connection: list[str]
) -> None:
    async with serving(STRICT) as port:
        [answer] = await answers(port, request("POST /whole", *headers, body=b"ab", version=version))
    assert (answer.line, answer.get("connection")) == (f"HTTP/{version} 200 OK", connection)


@pytest.mark.parametrize("path", ["/whole", "/refused"])
async def test_connections_are_not_kept_by_one_that_is_about_to_go(path: str) -> None:
    async with serving(STRICT, draining=True) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(f"POST {path}", body=b"ab"))
        everything: Any = await asyncio.wait_for(reader.read(), 5)  # until it is closed
        writer.close()
    assert b"\r\nconnection: close\r\n" in everything.lower()

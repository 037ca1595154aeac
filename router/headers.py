"""Which headers cross the router, either way."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from multidict import CIMultiDictProxy

from connectors.wire.note import LEG_HEADER
from router.client import header_lines

HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

# Ours to set on each leg, true only of the client's own exchange with us, or (the rank) an engine's business.
_NOT_ONWARD: Final = HOP_BY_HOP | {
    "host",
    "accept",
    "accept-encoding",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "x-conversation-id",
    "x-data-parallel-rank",
    "x-request-id",
}
_TRACED_NOT_ONWARD: Final = _NOT_ONWARD | {"traceparent", "tracestate"}
_NOT_BACK: Final = HOP_BY_HOP | {"content-encoding", "content-length", "date", "server", "x-request-id"}

OURS: Final = "x-backhaul-"
"""How names begin of what router and engines say to each other; none of it crosses."""
EXPLAIN: Final = "X-Backhaul-Explain"
"""The one a client may send, to us."""

MAX_ID_IN_CHILD: Final = 112
"""Characters of a request's id that its children's ids begin with."""
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")  # longer ones our engines would replace, each by another


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id for the request if it can be passed on and logged, else a new one."""
    given = headers.get("X-Request-Id", "")
    return given if _GOOD_ID.fullmatch(given) else os.urandom(16).hex()


def onward(headers: CIMultiDictProxy[str], request_id: str, leg: str | None = None, *, traced: bool = False) -> str:
    """Headers of a leg, as they are sent. Answers are asked for uncompressed: between neighbours it would cost more
    than it saves. `traced`: the client's place in a trace is not the engine's, which is told its own."""
    passed = _passing(headers, _TRACED_NOT_ONWARD if traced else _NOT_ONWARD)
    passed += [("Content-Type", "application/json"), ("Accept-Encoding", "identity"), ("X-Request-Id", request_id)]
    if leg is not None:
        passed.append((LEG_HEADER, leg))
    return header_lines(passed)


def child(lines: str, request_id: str, leg: str, number: int) -> str:
    """The headers of one of several requests that a turn makes at the same time: `lines` with ids of its own."""
    ids = os.urandom(3).hex()
    own = [
        ("X-Request-Id", f"{request_id[:MAX_ID_IN_CHILD]}:{number}:{ids}"),
        (LEG_HEADER, f"{leg}-{number}-{ids}"),
    ]
    return lines.removesuffix(header_lines([("X-Request-Id", request_id), (LEG_HEADER, leg)])) + header_lines(own)


def back(headers: CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """Headers of the decode engine's answer that go to the client; the body is passed on decompressed."""
    return _passing(headers, _NOT_BACK)


def _passing(headers: CIMultiDictProxy[str], stopped: frozenset[str]) -> list[tuple[str, str]]:
    if "Connection" in headers:
        stopped |= {name.strip().lower() for value in headers.getall("Connection") for name in value.split(",")}
    return [
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in stopped and not low.startswith(OURS)
    ]

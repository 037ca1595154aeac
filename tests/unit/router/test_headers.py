"""Which headers cross the router."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from router import headers


def proxy(*items: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(items))


def test_what_goes_on_to_engines() -> None:
    given = proxy(
        ("Authorization", "Bearer k"),
        ("traceparent", "00-1"),
        ("X-Vllm-Priority", "3"),
        ("X-Session-Id", "s"),
        ("X-Custom", "a"),
        ("X-Custom", "b"),
    )
    leg = headers.onward(given, "id-1")
    assert leg.getall("X-Custom") == ["a", "b"]
    assert {name: leg[name] for name in given} == dict(given.items()) | {"X-Custom": "a"}
    assert leg["X-Request-Id"] == "id-1"
    assert leg["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    "name",
    [
        *("Host", "Connection", "Keep-Alive", "Transfer-Encoding", "TE", "Trailer", "Upgrade", "Proxy-Authorization"),
        *("Content-Length", "Content-Encoding", "Expect", "X-Data-Parallel-Rank", "X-Conversation-Id"),
        "X-Backhaul-Explain",
    ],
)
def test_what_does_not(name: str) -> None:
    assert headers.onward(proxy((name, "x")), "id").get(name) is None


def test_headers_named_by_connection_stay_here() -> None:
    given = proxy(("Connection", "close, X-Hop"), ("X-Hop", "1"), ("X-Other", "2"))
    assert "X-Hop" not in headers.onward(given, "id")
    assert "X-Other" in headers.onward(given, "id")
    assert "X-Hop" not in headers.back(given)


def test_what_comes_back() -> None:
    given = proxy(
        ("Content-Type", "text/event-stream"),
        ("Server", "uvicorn"),
        ("Date", "x"),
        ("Content-Encoding", "gzip"),
        ("Content-Length", "5"),
        ("X-Request-Id", "theirs"),
        ("openai-processing-ms", "7"),
    )
    assert dict(headers.back(given)) == {"Content-Type": "text/event-stream", "openai-processing-ms": "7"}


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "a:b/c#d"])
def test_request_id_of_the_client_is_kept(given: str) -> None:
    assert headers.request_id({"X-Request-Id": given}) == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "ä", "a\x7f", "a\udc80"])
def test_request_id_that_cannot_be_passed_on_is_replaced(given: str) -> None:
    assert headers.request_id({"X-Request-Id": given}).isalnum()
    assert headers.request_id({}) != headers.request_id({})

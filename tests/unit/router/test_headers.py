"""Which headers cross the router."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from router import headers


def proxy(*items: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(items))


def sent(given: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers of a leg, read again from the lines that are sent."""
    lines = headers.onward(given, "id-1").split("\r\n")
    assert lines.pop() == ""
    return CIMultiDict(line.split(": ", 1) for line in lines)


def test_what_goes_on_to_engines() -> None:
    given = proxy(
        ("Authorization", "Bearer k"),
        ("traceparent", "00-1"),
        ("X-Vllm-Priority", "3"),
        ("X-Session-Id", "s"),
        ("X-Custom", "a"),
        ("X-Custom", "b"),
    )
    leg = sent(given)
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
    assert sent(proxy((name, "x"))).get(name) is None


def test_headers_named_by_connection_stay_here() -> None:
    given = proxy(("Connection", "close, X-Hop"), ("X-Hop", "1"), ("X-Other", "2"))
    assert "X-Hop" not in sent(given)
    assert "X-Other" in sent(given)
    assert "X-Hop" not in dict(headers.back(given))


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


def test_child_has_ids_of_its_own_and_all_else_of_its_parent() -> None:
    given = proxy(("Authorization", "Bearer k"), ("Foo-X-Request-Id", "id-1"))
    lines = headers.onward(given, "id-1", "leg")
    one, two = (headers.child(lines, "id-1", "leg", number) for number in (0, 1))
    parent, child = (dict(line.split(": ", 1) for line in text.splitlines()) for text in (lines, one))
    assert child["X-Request-Id"].startswith("id-1:0:")
    assert child["X-Backhaul-Leg"].startswith("leg-0-")
    assert one.count("X-Request-Id: ") == lines.count("X-Request-Id: ")
    assert one != two
    changed = {"X-Request-Id", "X-Backhaul-Leg"}
    assert {key: value for key, value in parent.items() if key not in changed} == {
        key: value for key, value in child.items() if key not in changed
    }


def test_ids_of_children_are_no_longer_than_ids_may_be() -> None:
    longest = "x" * 128
    lines = headers.child(headers.onward(proxy(), longest, "leg"), longest, "leg", 99_999)
    [own] = [line.partition(": ")[2] for line in lines.splitlines() if line.startswith("X-Request-Id")]
    assert headers.request_id({"X-Request-Id": own}) == own

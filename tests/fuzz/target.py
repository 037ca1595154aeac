"""A server under fire: raw requests to it, and what every answer must be, whatever was asked.

No 5xx but 503, never silence; errors in OpenAI's shape; JSON that any parser reads; streams that end as they should.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from connectors.wire.openai import MAX_MESSAGE, MAX_PARAM

HANG_SECONDS = 60.0
SLOW_SECONDS = 20.0
"""The machine that runs the tests may be busy."""
_MALFORMED_HTTP = b"Can not decode content-encoding"
"""aiohttp answers so before any of our code runs."""
_JSON, _EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").split(";")[0].strip()


@dataclass
class Target:
    url: str
    statuses: dict[int, int] = field(default_factory=dict)
    """How many answers of each."""
    _connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None) -> Reply:
        """Raises OSError or HTTPException where there is no answer."""
        address = urlsplit(self.url)
        connection = self._connection or http.client.HTTPConnection(address.netloc, timeout=HANG_SECONDS)
        self._connection = None
        try:
            connection.request(method, path, body, {"Content-Type": _JSON, **(headers or {})})
            answer = connection.getresponse()
            reply = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        except BaseException:
            connection.close()
            raise
        self._connection = connection  # it opens itself again where the server has closed it
        self.statuses[reply.status] = self.statuses.get(reply.status, 0) + 1
        return reply

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def fault(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> str | None:
        """What is wrong with the answer to this POST, if anything."""
        started = time.monotonic()
        try:
            reply = self.ask("POST", path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            return f"no answer: {error!r}"
        seconds = time.monotonic() - started
        return wrong_with(reply) or (f"took {seconds:.1f} s" if seconds > SLOW_SECONDS else None)


def wrong_with(reply: Reply) -> str | None:
    """What is wrong with an answer, if anything."""
    try:
        _check(reply)
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        return f"{reply.status} {reply.content_type}: {str(error)[:300]} in {reply.body[:600]!r}"
    return None


def _check(reply: Reply) -> None:
    assert reply.status < 500 or reply.status == 503, "a server error"
    if reply.content_type == _EVENTS:
        assert reply.status == 200, "events beside an error"
        _check_events(reply.body)
    elif reply.status == 400 and reply.body.startswith(_MALFORMED_HTTP):
        pass
    elif reply.status >= 400:
        assert reply.content_type == _JSON, "an error that is no JSON"
        _check_error(_loads(reply.body)["error"])
        assert reply.status != 503 or "retry-after" in reply.headers, "a 503 that does not say when to come again"
    elif reply.content_type == _JSON:
        _loads(reply.body)


def _check_events(body: bytes) -> None:
    events = [event for event in body.decode().split("\n\n") if event]
    data = [line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data: ")]
    assert data, "a stream without an event"
    named = events[-1].startswith("event: response.")
    assert named or data[-1] == "[DONE]", "a stream that does not end"
    for text in data if named else data[:-1]:
        error = _loads(text.encode()).get("error")
        if error is not None:
            _check_error(error)
            assert error["code"] not in (500, 502, 504), "a server error in a stream"


def _check_error(error: Any) -> None:
    assert error.keys() == {"message", "type", "param", "code"}, "not an OpenAI error"
    message, param = error["message"], error["param"]
    assert isinstance(message, str), "the message is no text"
    assert 0 < len(message) <= MAX_MESSAGE, "a message too short or too long"
    assert isinstance(error["type"], str), "no type of error"
    assert param is None or isinstance(param, str), "the param is no text"
    assert len(param or "") <= MAX_PARAM, "the param is too long"
    assert isinstance(error["code"], str | int | None), "the code is neither text nor a number"


def _loads(text: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text.decode(), parse_constant=refuse)

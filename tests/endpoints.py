"""What tells the router's four endpoints apart for tests of what they have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from connectors.wire import sse
from tests.router_harness import Answer
from tests.stub_engine import OUTPUT_IDS, TEXT

Json = dict[str, Any]
INTERNAL = (b"_transfer_params", b"token_note", b"remote_", b"prompt_token_ids", b"num_cached_tokens", b"layout-1")
CONTENT = b'"content":'


@dataclass(frozen=True)
class Endpoint:
    name: str
    path: str
    plain: Json
    """A request."""

    def body(self, **fields: Any) -> Json:
        return {**self.plain, **fields}

    def limited(self, **sampling: Any) -> Json:
        """A request with sampling parameters, where this endpoint has them."""
        return self.body(sampling_params=sampling) if self.name == "generate" else self.body(**sampling)

    def sampling(self, leg: Json) -> Json:
        return dict(leg["sampling_params"]) if self.name == "generate" else leg

    def said(self, answer: Answer, *, stream: bool) -> bool:
        """Whether it is the stub engine's answer, all of it, and nothing else."""
        assert answer.status == 200, answer.raw
        if self.name == "responses":
            response = answer.events[-1]["response"] if stream else answer.json
            deltas = "".join(event.get("delta", "") for event in answer.events) if stream else TEXT
            return bool(response["output"][0]["content"][0]["text"] == deltas == TEXT)
        if stream:
            assert answer.events[-1] == "[DONE]"
        if self.name == "generate":
            events = answer.events[:-1] if stream else [answer.json]
            return [token for event in events for choice in event["choices"] for token in choice["token_ids"]] == (
                OUTPUT_IDS
            )
        return (answer.text if stream else answer.text_of_whole) == TEXT

    def looks_complete(self, answer: Answer) -> bool:
        """Whether a client would take this stream for a whole answer."""
        last = answer.events[-1]
        return last == "[DONE]" or (isinstance(last, dict) and last.get("type") == "response.completed")

    def told_error(self, answer: Answer) -> Json:
        """What the one error event of a stream says, which must be the last."""
        *before, last = answer.events
        assert isinstance(last, dict)
        if self.name == "responses":
            assert [event for event in before if event["type"] == "error"] == []
            assert answer.raw.rstrip().splitlines()[-2] == b"event: error"
            assert last["type"] == "error"
            return last
        assert [event for event in before if "error" in event] == []
        return dict(last["error"])

    def pieces(self, said: list[Json]) -> list[bytes]:
        """Events that say so, framed as this endpoint's are."""
        if self.name == "responses":
            return [f"event: {event['type']}\n".encode() + sse.event(event) for event in said]
        return [sse.event(event) for event in said]

    def compact(self) -> bytes:
        return json.dumps(self.plain).encode()


ENDPOINTS = {
    endpoint.name: endpoint
    for endpoint in (
        Endpoint("chat", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}),
        Endpoint("completions", "/v1/completions", {"model": "m", "prompt": "Hi"}),
        Endpoint("responses", "/v1/responses", {"model": "m", "input": "Hi"}),
        Endpoint("generate", "/inference/v1/generate", {"model": "m", "token_ids": [5, 6, 7]}),
    )
}
every_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=list(ENDPOINTS))
with_choices = pytest.mark.parametrize(
    "endpoint", [each for each in ENDPOINTS.values() if each.name != "responses"], ids=lambda each: each.name
)
streamed_and_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

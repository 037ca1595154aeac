"""An answer of the responses endpoint: a `response` object, whole or within the first and last events of a stream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from connectors.wire import sse
from router.answer import Seen, Wishes
from router.api.response_history import messages_of

# With these the client's answer begins or ends; no other event holds anything of ours.
_MARKS: Final = re.compile(
    rb'"(?:type":\s*"(?:error|response\.(?:created|in_progress|completed|incomplete|failed))"'
    rb'|token_note"|(?:kv|ec)_transfer_params")'
)
_ENDINGS: Final = ("response.completed", "response.incomplete", "response.failed")
_IDS: Final = ("prompt_token_ids", "token_ids")


class ResponseAnswer:
    def __init__(self, wishes: Wishes) -> None:
        self.seen = Seen(wishes)
        self.keeps_message = True
        self._ended = False
        self._num_events = 0
        self._response: Mapping[str, Any] = {}

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def message(self) -> dict[str, Any]:
        output = self._response.get("output")
        said = messages_of(output if isinstance(output, list) else [])
        return said[-1] if said else {"role": "assistant", "content": "", "tool_calls": []}

    def must_read(self, data: bytes) -> bool:
        return _MARKS.search(data) is not None

    def pass_by(self, raw: bytes, num_events: int) -> None:
        self._num_events += num_events  # what is in it, the last event repeats

    def take(self, body: dict[str, Any]) -> bool:
        self._num_events += 1
        kind = body.get("type")
        changed = self._take_from(body)
        response = body.get("response")
        if isinstance(response, dict):
            changed |= self._take_from(response)
        elif "output" in body:
            response = body  # in one piece
        failed = kind in ("error", "response.failed") or isinstance(body.get("error"), dict)
        if failed and self.seen.error is None:  # the first event that tells of it is the one that knows its code
            self.seen.error = _error(body, response)
        if isinstance(response, dict) and response.get("status") in ("completed", "incomplete"):
            self._response = response
            self.seen.finished = response["status"] == "completed" or _reason(response) is not None
            self.seen.see_usage(response.get("usage"))
        self._ended = kind in _ENDINGS
        return changed

    def is_superfluous(self, body: dict[str, Any]) -> bool:
        return False

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        told = error["error"]
        event = {"type": "error", "code": str(told.get("code")), "message": told.get("message"), "param": None}
        event["sequence_number"] = self._num_events
        return b"event: error\n" + sse.event(event)

    def _take_from(self, holder: dict[str, Any]) -> bool:
        changed = self.seen.take_params(holder)
        wishes = self.seen.wishes
        for key, wanted in zip(_IDS, (wishes.prompt_ids, wishes.output_ids), strict=True):
            if key in holder and not wanted:
                del holder[key]
                changed = True
        if "num_cached_tokens" in holder:
            del holder["num_cached_tokens"]
            changed = True
        return changed


def _reason(response: Mapping[str, Any]) -> object:
    """Why an answer is incomplete: it came to a limit, or nothing is said, as when it was aborted."""
    details = response.get("incomplete_details")
    return details.get("reason") if isinstance(details, dict) else None


def _error(body: Mapping[str, Any], response: object) -> Mapping[str, Any]:
    inner = response.get("error") if isinstance(response, dict) else None
    for told in (body.get("error"), inner):
        if isinstance(told, dict):
            return told
    code = body.get("code")
    if isinstance(code, str) and code.isdecimal():  # a status: this endpoint writes codes as text
        code = int(code)
    return {"message": str(body.get("message") or "the response failed"), "code": code}

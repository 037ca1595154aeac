"""How `/v1/responses` writes its answers: one `response` object, whole or told of by typed events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.api.generation import Choice, Json, frame
from engine.api.responses_answer import ResponseOutput
from engine.logprobs import TokenLogprobs
from engine.output import Delta


@dataclass
class ResponseShape:
    """State of one call: there is only one choice."""

    id: str
    echo: Mapping[str, object]
    """What the response repeats of its request."""
    output: ResponseOutput
    logprob_json: Callable[[TokenLogprobs], Json]
    return_token_ids: bool
    created_at: int = field(default_factory=lambda: int(time.time()))
    name: str = "responses"
    _num_events: int = 0

    @property
    def end(self) -> bytes:
        return b""

    def opening(self, choice: Choice) -> list[Json]:
        return []  # events() begins with it, so that even a choice without items has one

    def events(self, choice: Choice, delta: Delta) -> list[Json]:
        events = [] if choice.opened else self._beginning(choice)
        return events + self._read(choice, delta.texts, delta.token_ids, delta.logprobs)

    def closing(self, choices: Sequence[Choice], usage: Json, *, include_usage: bool) -> list[Json]:
        response = self._finished(choices[0], usage)
        return [{"type": f"response.{response['status']}", "response": response}]

    def frame(self, event: Json) -> bytes:
        numbered = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {event['type']}\n".encode() + frame(numbered)

    def error(self, body: Json) -> bytes:
        told = body["error"]
        code = None if told["code"] is None else str(told["code"])
        event = {"type": "error", "code": code, "message": told["message"], "param": told["param"]}
        reason = {"error": {"code": "server_error", "message": told["message"]}}
        failed = {"type": "response.failed", "response": self._response("failed", self.output.items) | reason}
        return self.frame(event) + self.frame(failed)

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json:
        choice = choices[0]
        self._read(choice, choice.parts, choice.token_ids, choice.logprobs)
        ids = {"prompt_token_ids": choice.request.prompt_token_ids} if self.return_token_ids else {}
        return self._finished(choice, usage) | ids

    def _beginning(self, choice: Choice) -> list[Json]:
        response = self._response("in_progress", [])
        prompt: Json = {}
        if self.return_token_ids:
            prompt["prompt_token_ids"] = choice.request.prompt_token_ids
            prompt["num_cached_tokens"] = choice.num_reused_tokens
        return [
            {"type": "response.created", "response": response | prompt},
            {"type": "response.in_progress", "response": response},
        ]

    def _read(
        self, choice: Choice, texts: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[Json]:
        reason = choice.finish_reason
        hidden = reason == "stop" and not choice.stopped and not choice.request.sampling.include_stop_str_in_output
        events = self.output.push(texts, token_ids, list(map(self.logprob_json, logprobs)), hide_last=hidden)
        return events if reason is None else events + self.output.end(_status(choice))

    def _finished(self, choice: Choice, usage: Json) -> Json:
        status = _status(choice)
        response = self._response(status, self.output.items)
        if status == "completed":
            response["completed_at"] = int(time.time())
        else:
            reason = "max_output_tokens" if choice.finish_reason == "length" else None
            response["incomplete_details"] = {"reason": reason}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.output.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
        ids = {"token_ids": choice.token_ids} if self.return_token_ids else {}
        return response | ids | choice.params_json

    def _response(self, status: str, output: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            **self.echo,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "max_tool_calls": None,
            "output": list(output),
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None,
        }


def _status(choice: Choice) -> str:
    return "completed" if choice.finish_reason == "stop" else "incomplete"

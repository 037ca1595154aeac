"""How `/v1/chat/completions` writes its answers: messages, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.api.bodies.chat import ChatBody
from engine.api.context import Serving
from engine.api.generation import DONE, Choice, Json, frame
from engine.api.logprobs import logprob_json, prompt_logprobs_json
from engine.formats.base import CallDelta, Parser, Piece
from engine.logprobs import TokenLogprobs
from engine.output import Delta


@dataclass
class ChatShape:
    id: str
    serving: Serving
    body: ChatBody
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = "chat"
    _parsers: dict[int, Parser] = field(default_factory=dict)
    """Of the choices in a stream."""
    _calling: set[int] = field(default_factory=set)
    """Choices that have called a tool."""

    @property
    def end(self) -> bytes:
        return DONE

    def opening(self, choice: Choice) -> list[Json]:
        first = self._chunk([self._delta(choice, {"role": self.body.role, "content": ""})])
        if self.body.return_token_ids:
            first["prompt_token_ids"] = choice.request.prompt_token_ids
            first["num_cached_tokens"] = choice.num_reused_tokens
        if not self.body.echoed:
            return [first]
        return [first, self._chunk([self._delta(choice, {"content": self.body.echoed})])]

    def events(self, choice: Choice, delta: Delta) -> list[Json]:
        if choice.index not in self._parsers:
            self._parsers[choice.index] = self._parser(choice)
        parser = self._parsers[choice.index]
        piece = parser.push(delta.text, delta.token_ids)
        if choice.finish_reason is not None:
            piece += parser.end()
        told = self._told(choice, piece)
        tells_tokens = self.body.return_token_ids or self.body.logprobs
        if not (told or choice.finish_reason or (tells_tokens and delta.token_ids)):
            return []
        entry = self._delta(choice, told, delta.logprobs)
        entry["finish_reason"] = self._finish_reason(choice)
        if choice.finish_reason is not None:
            entry["stop_reason"] = choice.stop_reason
        if self.body.return_token_ids:
            entry["token_ids"] = delta.token_ids
        return [self._chunk([entry]) | choice.params_json]

    def closing(self, choices: Sequence[Choice], usage: Json, *, include_usage: bool) -> list[Json]:
        return [self._chunk([]) | {"usage": usage}] if include_usage else []

    def frame(self, event: Json) -> bytes:
        return frame(event)

    def error(self, body: Json) -> bytes:
        return frame(body)

    def answer(self, choices: Sequence[Choice], usage: Json) -> Json:
        first = choices[0]
        whole = {**self._head("chat.completion"), "choices": [self._entry(choice) for choice in choices]}
        whole["usage"] = usage
        whole["system_fingerprint"] = f"fp_{self.serving.model_fingerprint.hex()[:10]}"
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = first.request.prompt_token_ids
        if self.body.prompt_logprobs is not None and first.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs_json(
                first.prompt_logprobs, self.serving.tokenizer, self.body.prompt_logprobs
            )
        return whole | first.params_json

    def _entry(self, choice: Choice) -> Json:
        parser = self._parser(choice)
        piece = parser.push(choice.text, choice.token_ids) + parser.end()
        told = self._told(choice, piece)
        content = self.body.echoed + told.pop("content", "")
        message: Json = {"role": self.body.role, "content": content if content or not told else None, **told}
        for call in message.get("tool_calls", ()):
            del call["index"]
        entry: Json = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            entry["token_ids"] = choice.token_ids
        return entry

    def _parser(self, choice: Choice) -> Parser:
        return self.serving.chat.parser(
            tools=self.body.tools, choice=self.body.choice, prompt_token_ids=choice.request.prompt_token_ids
        )

    def _told(self, choice: Choice, piece: Piece) -> Json:
        """What a piece adds to a message, of what the client wants to see."""
        told: Json = {}
        if piece.reasoning and self.body.include_reasoning is not False:
            # The field's older name beside the one vLLM has now: clients read one or the other.
            told["reasoning"] = told["reasoning_content"] = piece.reasoning
        if piece.content:
            told["content"] = piece.content
        if calls := [call for call in piece.calls if self.body.parallel or call.index == 0]:
            told["tool_calls"] = list(map(_call_json, calls))
            self._calling.add(choice.index)
        return told

    def _finish_reason(self, choice: Choice) -> str | None:
        called = choice.index in self._calling and choice.finish_reason == "stop"
        return "tool_calls" if called else choice.finish_reason

    def _delta(self, choice: Choice, delta: Json, logprobs: Sequence[TokenLogprobs] = ()) -> Json:
        told = self._logprobs(logprobs) if logprobs else None
        return {"index": choice.index, "delta": delta, "logprobs": told, "finish_reason": None}

    def _logprobs(self, items: Iterable[TokenLogprobs]) -> Json | None:
        if not self.body.logprobs:
            return None
        count, as_id = self.body.top_logprobs or 0, bool(self.body.return_tokens_as_token_ids)
        tokenizer = self.serving.tokenizer
        return {"content": [logprob_json(item, tokenizer=tokenizer, count=count, as_id=as_id) for item in items]}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": choices}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.serving.model_name}


def _call_json(call: CallDelta) -> Json:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}

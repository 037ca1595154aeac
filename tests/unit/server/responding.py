"""What tests of /v1/responses have in common: a server whose model thinks and calls, and what it is to say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson
from openai.types.responses import Response

from engine.formats.hermes import HermesCalls
from engine.formats.template import TemplateFormat
from engine.logprobs import TokenLogprobs
from engine.messages import Output
from engine.request import Request
from tests.tiny import IM_END
from tests.unit.server.double import MAX_MODEL_LEN, Script, Stage

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WHOLE = f"<think>so, Rome</think>\n\nLet me see.\n{CALL}\n{CALL}"
IDS_AND_TIMES = ("id", "call_id", "created_at", "completed_at", "item_id")


def use_format(stage: Stage, *, thinks: bool = True) -> None:
    chat = TemplateFormat(stage.tokenizer, calls=HermesCalls(), thinks=thinks, max_model_len=MAX_MODEL_LEN)
    stage.worker.serving = replace(stage.serving, chat=chat)


def answers(stage: Stage, text: str, *, cuts: Iterable[int] | None = None, **end: Any) -> Script:
    """Answer with this text, the tokens cut into outputs at `cuts` (after each token by default)."""
    tokens = stage.tokenizer.encode(text, add_special_tokens=False)
    if end.get("finish_reason") == "stop":
        tokens.append(IM_END)
    edges = [
        *sorted(cut for cut in (range(1, len(tokens)) if cuts is None else cuts) if cut < len(tokens)),
        len(tokens),
    ]

    def script(request: Request) -> Iterable[Output]:
        wanted = request.sampling.logprobs is not None
        start = 0
        for edge in edges:
            ids = tokens[start:edge]
            told = [TokenLogprobs(token, -0.5, 1, ((token, -0.5),)) for token in ids] if wanted else []
            last = {"finish_reason": "length"} | end if edge == edges[-1] else {}
            start = edge
            yield Output(request.request_id, ids, logprobs=told, num_cached_tokens=3, **last)

    return script


async def events_of(stage: Stage, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream as they are on the wire, each of which must be well-formed and numbered."""
    async with stage.session.post(RESPONSES, json={"stream": True, "input": "hi"} | body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        frames = (await response.read()).decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def without(value: Any, keys: Iterable[str]) -> Any:
    """The same less these keys, at any depth."""
    if isinstance(value, dict):
        return {key: without(item, keys) for key, item in value.items() if key not in keys}
    return [without(item, keys) for item in value] if isinstance(value, list) else value


async def whole(stage: Stage, **fields: Any) -> dict[str, Any]:
    """A whole answer, which must be what the API says it is."""
    status, answer = await stage.post(RESPONSES, {"input": "hi"} | fields)
    assert status == 200, answer
    Response.model_validate(answer)
    return answer


async def refused(stage: Stage, fields: dict[str, Any], status: int = 400) -> dict[str, Any]:
    got, answer = await stage.post(RESPONSES, {"input": "hi"} | fields)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert stage.submitted == []
    return answer["error"]

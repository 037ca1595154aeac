"""vLLM 0.32 with the one thing that 0.33 adds for a router: the last chunk of a chat's stream carries transfer params.

Started by the Python of the vLLM environment: `python stream_params.py serve MODEL ...`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

stream_as_it_is = OpenAIServingChat.chat_completion_stream_generator


async def stream_with_params(
    self: Any, request: Any, outputs: AsyncIterator[Any], *args: Any, **more: Any
) -> AsyncIterator[str]:
    params: dict[str, Any] | None = None

    async def watched() -> AsyncIterator[Any]:
        nonlocal params
        async for output in outputs:
            params = output.kv_transfer_params or params
            yield output

    async for event in stream_as_it_is(self, request, watched(), *args, **more):
        yield with_params(event, params) if event.startswith("data: {") else event


def with_params(event: str, params: dict[str, Any] | None) -> str:
    """As in 0.33: null on every chunk of content, the params on the one that says why the answer ended."""
    chunk = json.loads(event.removeprefix("data: "))
    choices = chunk.get("choices") or [{"delta": {"role": ""}}]
    if "role" in choices[0].get("delta", {}):
        return event
    chunk["kv_transfer_params"] = params if choices[0].get("finish_reason") else None
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


OpenAIServingChat.chat_completion_stream_generator = stream_with_params

if __name__ == "__main__":
    sys.exit(main())

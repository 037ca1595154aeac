"""What is refused for want of room, or given up before it began, costs no work and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from connectors.transport import Peer
from connectors.wire.note import LEG_HEADER
from engine.grammars import Grammars
from tests.unit.server.double import Stage, eventually, params_for_decode

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OWNER = (Peer("the-prefill-engine", "10.0.0.1", 8100), "chatcmpl-p")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/inference/v1/generate"])
async def test_full_queue_refuses_before_there_is_work_on_the_prompt(tiny_model: Path, path: str) -> None:
    text = "hello " * 10
    body = {"messages": [{"role": "user", "content": text}], "prompt": text, "input": text, "token_ids": [1]}
    async with Stage(tiny_model, capacity=0) as stage:
        async with stage.session.post(path, json=body) as response:
            assert (response.status, "Retry-After" in response.headers) == (503, True)
            assert "the queue is full" in (await response.json())["error"]["message"]
        assert stage.tokenizer.calls == 0


@pytest.mark.parametrize("refused", ["draining", "full", "invalid"])
async def test_blocks_of_a_leg_that_the_router_can_send_elsewhere_are_left_to_it(
    tiny_model: Path, refused: str
) -> None:
    async with Stage(tiny_model, role="decode", kv=True, capacity=0) as decode:
        decode.worker.draining = refused == "draining"
        body = {"messages": [{"role": "user", "content": "hi"}], "kv_transfer_params": params_for_decode()}
        if refused == "invalid":
            body["temperature"] = -1
            decode.client.capacity = 1
        status, _ = await decode.post(CHAT, body, headers={LEG_HEADER: "leg"})
        assert status == (400 if refused == "invalid" else 503)
        assert decode.transport.released == ([OWNER] if refused == "invalid" else [])


async def test_blocks_of_a_leg_whose_client_leaves_while_its_grammar_compiles_are_released(
    decode: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def compile(grammars: Grammars, spec: object, count: int) -> list[None]:
        begun.set()
        go_on.wait(5)
        return [None] * count

    monkeypatch.setattr(Grammars, "compile", compile)
    body = {"prompt": "a", "response_format": {"type": "json_object"}, "kv_transfer_params": params_for_decode()}
    leaving = asyncio.create_task(decode.post(COMPLETIONS, body))
    await eventually(begun.is_set)
    leaving.cancel()
    await eventually(lambda: decode.transport.released == [OWNER])
    go_on.set()
    assert (await decode.chat())[0] == 200
    assert len(decode.submitted) == 1
    assert decode.client.num_open == 0

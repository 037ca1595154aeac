"""Ids of the prompt that come with the transfer params, in place of what a chat's template would make of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from connectors.transport import Peer
from tests.harmony_model import make_tiny_harmony
from tests.unit.server.double import Stage, params_for_decode

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PARAM = "kv_transfer_params.prompt_token_ids"
OWNER = (Peer("the-prefill-engine", "10.0.0.1", 8100), "chatcmpl-p")
IDS = list(range(20))
NO_IDS = ([], [-1], [1.5], [1.0], ["1"], [True], "abc", 5, [320])
"""What is no list of ids: the last is beyond the vocabulary."""
MEDIA = ("image_url", "input_audio", "video_url", "file", "image_embeds")
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"template": tiny_model, "harmony": make_tiny_harmony(tmp_path_factory.mktemp("harmony") / "llama")}


@pytest.fixture(params=["template", "harmony"])
async def decode(models: dict[str, Path], request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """A decode engine of either kind of format."""
    async with Stage(models[request.param], role="decode", kv=True) as stage:
        stage.tokenizer.calls = 0  # a format may make some of its own before the first request
        yield stage


async def test_item_123_ids_are_used_and_taken_out_and_the_rest_is_kept(decode: Stage) -> None:
    params = params_for_decode(prompt_token_ids=IDS, theirs={"a": 1})
    status, answer = await decode.chat(kv_transfer_params=params)
    assert status == 200, answer
    (request,) = decode.submitted
    assert request.prompt_token_ids == IDS
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params.to_json() == params_for_decode(theirs={"a": 1})
    assert decode.tokenizer.calls == 0


@streamed
async def test_item_124_and_125_what_is_no_list_of_ids_is_refused_and_the_blocks_are_let_go(
    decode: Stage, stream: bool
) -> None:
    for num_refused, ids in enumerate(NO_IDS, start=1):
        status, answer = await decode.chat(kv_transfer_params=params_for_decode(prompt_token_ids=ids), stream=stream)
        told = (status, answer["error"]["type"], answer["error"]["param"])
        assert told == (400, "BadRequestError", PARAM), ids
        assert decode.transport.released == [OWNER] * num_refused, ids
    assert decode.submitted == []


async def test_item_126_a_chat_that_is_echoed_ignores_them_whatever_they_are(decode: Stage) -> None:
    assert (await decode.chat(echo=True))[0] == 200
    for ids in (IDS, *NO_IDS):
        status, answer = await decode.chat(kv_transfer_params=params_for_decode(prompt_token_ids=ids), echo=True)
        assert status == 200, answer
        alone, request = decode.submitted[0], decode.submitted[-1]
        assert request.prompt_token_ids == alone.prompt_token_ids
        assert request.kv_transfer_params is not None
        assert request.kv_transfer_params.to_json() == params_for_decode()
    assert decode.transport.released == []


@pytest.mark.parametrize("kind", MEDIA)
async def test_item_127_media_are_refused_with_ids_as_without(decode: Stage, kind: str) -> None:
    """They stand for a prompt that the ids do not tell."""
    content = [{"type": "text", "text": "hi"}, {"type": kind, kind: {"url": "data:,"}}]
    for num_refused, ids in enumerate((None, IDS), start=1):
        body = {"messages": [{"role": "user", "content": content}]}
        params = params_for_decode(prompt_token_ids=ids)
        status, answer = await decode.post(CHAT, body | {"kv_transfer_params": params})
        where = "messages" if kind == "image_url" else "messages[0].content"  # this model sees nothing
        assert (status, answer["error"]["param"]) == (400, where)
        assert decode.transport.released == [OWNER] * num_refused
    assert decode.submitted == []


async def test_item_127_parts_that_are_text_change_nothing(decode: Stage) -> None:
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = {"messages": [{"role": "user", "content": content}]}
    params = params_for_decode(prompt_token_ids=IDS)
    assert (await decode.post(CHAT, body | {"kv_transfer_params": params}))[0] == 200
    assert decode.submitted[0].prompt_token_ids == IDS
    assert decode.tokenizer.calls == 0


@streamed
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_item_128_ids_count_and_not_what_stands_beside_them(decode: Stage, path: str, stream: bool) -> None:
    """The answer tells which ids those were, a stream with its first event."""
    said = {"messages": [{"role": "user", "content": "something else"}]} if path == CHAT else {"input": "something"}
    body = said | {"return_token_ids": True, "kv_transfer_params": params_for_decode(prompt_token_ids=IDS)}
    async with decode.session.post(path, json=body | {"stream": stream}) as response:
        assert response.status == 200
        text = await response.read()
    told = [event for event in map(_json, text.splitlines()) if event] if stream else [orjson.loads(text)]
    told = [event.get("response", event) for event in told]
    assert [event.get("prompt_token_ids") for event in told] == [IDS] + [None] * (len(told) - 1)
    assert decode.submitted[0].prompt_token_ids == IDS
    assert decode.tokenizer.calls == 0


def _json(line: bytes) -> Any:
    return orjson.loads(line[6:]) if line.startswith(b"data: {") else None


PICTURE = {"type": "input_image", "image_url": "data:,"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
PICTURED: dict[str, list[Any]] = {
    "question": [{"role": "user", "content": [PICTURE]}],
    "output of a function": [CALL, {"type": "function_call_output", "call_id": "c", "output": [PICTURE]}],
    "history": [
        {"role": "user", "content": [PICTURE]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ],
}


@pytest.mark.parametrize("where", PICTURED)
async def test_item_130_pictures_anywhere_in_a_response_are_refused(decode: Stage, where: str) -> None:
    """By an engine whose model sees nothing."""
    params = params_for_decode(prompt_token_ids=IDS)
    status, answer = await decode.post(RESPONSES, {"input": PICTURED[where], "kv_transfer_params": params})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert decode.submitted == []
    assert decode.transport.released == [OWNER]


@pytest.mark.parametrize(
    "items", ["hi", [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]], ids=["text", "parts"]
)
async def test_item_130_a_response_of_text_takes_them(decode: Stage, items: Any) -> None:
    params = params_for_decode(prompt_token_ids=IDS)
    assert (await decode.post(RESPONSES, {"input": items, "kv_transfer_params": params}))[0] == 200
    assert decode.submitted[0].prompt_token_ids == IDS
    assert decode.tokenizer.calls == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/v1/messages", "/v1/messages/count_tokens"])
async def test_item_129_and_131_endpoints_that_are_not_there(decode: Stage, path: str) -> None:
    body = MESSAGES | {"kv_transfer_params": params_for_decode(prompt_token_ids=IDS)}
    status, answer = await decode.post(path, body)
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")

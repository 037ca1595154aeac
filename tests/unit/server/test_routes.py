"""The routes over real HTTP, with an engine that follows a script."""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from connectors.transport import LeaseReleased, Peer
from connectors.wire.transfer import KVTransferParams
from engine.api import chat as chat_api
from engine.api.bodies.chat import ChatBody, parse_chat
from engine.api.offload import LARGE_BODY
from engine.messages import Output
from tests.unit.server.double import (
    BLOCK_SIZE,
    ENGINE_ID,
    MAX_MODEL_LEN,
    Stage,
    byte_ids,
    eventually,
    params_for_decode,
    says,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OWNER = (Peer("the-prefill-engine", "10.0.0.1", 8100), "chatcmpl-p")


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


async def test_chat_answer(stage: Stage) -> None:
    status, answer = await stage.chat(max_tokens=5)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    (request,) = stage.submitted
    assert answer["usage"] == {
        "prompt_tokens": request.num_prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": request.num_prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert "kv_transfer_params" not in answer
    assert "prompt_token_ids" not in answer


async def test_chat_stream_has_role_text_finish_and_usage_in_this_order(stage: Stage) -> None:
    events = await stage.stream(
        CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}
    )
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "hello"
    finishes = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert finishes[-1] == "length"
    assert set(finishes[:-1]) == {None}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert all("usage" not in event for event in events[:-1])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


async def test_usage_on_every_chunk_if_asked_for(stage: Stage) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stage.stream(COMPLETIONS, {"prompt": "hi", "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_completion_answer_of_text_and_ids(stage: Stage) -> None:
    for prompt in ("hi", byte_ids("hi")):
        status, answer = await stage.post(COMPLETIONS, {"prompt": prompt, "return_token_ids": True})
        assert status == 200
        (choice,) = answer["choices"]
        assert choice["text"] == "hello"
        assert choice["token_ids"] == byte_ids("hello")
        assert choice["prompt_token_ids"] == stage.submitted[-1].prompt_token_ids
    assert stage.submitted[0].prompt_token_ids == stage.submitted[1].prompt_token_ids
    assert stage.submitted[0].sampling.max_tokens == 16


async def test_several_prompts_are_several_choices(stage: Stage) -> None:
    status, answer = await stage.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 15
    events = await stage.stream(COMPLETIONS, {"prompt": ["a", "b"], "return_token_ids": True})
    for index in (0, 1):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        assert text_of(mine) == "hello"
        assert [e["choices"][0].get("prompt_token_ids") for e in mine] == [byte_ids("ab"[index])] + [None] * (
            len(mine) - 1
        )


async def test_token_ids_in_the_stream(stage: Stage) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    events = await stage.stream(CHAT, body)
    assert events[0]["prompt_token_ids"] == stage.submitted[0].prompt_token_ids
    assert all("prompt_token_ids" not in event for event in events[1:])
    ids = [token for event in events[1:] for token in event["choices"][0]["token_ids"]]
    assert ids == byte_ids("hello")


async def test_stop_string_ends_the_engine_request_and_waits_for_its_params(prefill: Stage) -> None:
    stage = prefill
    stage.script = lambda request: [Output(request.request_id, [token]) for token in byte_ids("one two")]
    events = await stage.stream(COMPLETIONS, {"prompt": "hi", "stop": ["e t"]})
    assert text_of(events) == "on"
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "e t")
    (stop,) = stage.stops
    assert not stop.aborted
    assert stop.num_output_tokens == 5
    status, answer = await stage.post(
        COMPLETIONS, {"prompt": "hi", "stop": ["e t"], "return_token_ids": True, "include_stop_str_in_output": True}
    )
    assert status == 200
    assert answer["choices"][0]["text"] == "one t"
    assert answer["choices"][0]["token_ids"] == byte_ids("one t")


async def test_stop_token_is_counted_but_not_shown(stage: Stage) -> None:
    stage.script = says("hello!", finish_reason="stop", stop_token_id=byte_ids("!")[0])
    _, answer = await stage.post(COMPLETIONS, {"prompt": "hi", "stop_token_ids": byte_ids("!")})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", byte_ids("!")[0])
    assert answer["usage"]["completion_tokens"] == 6


async def test_transfer_params_are_on_the_finish_chunk_only(prefill: Stage) -> None:
    held = {"do_remote_decode": True, "do_remote_prefill": False}

    def script(request: Any) -> list[Output]:
        params = request.kv_transfer_params.with_(remote_block_ids=[[1]])
        ending = Output(request.request_id, byte_ids("b"), "length", kv_transfer_params=params)
        return [Output(request.request_id, byte_ids("a")), ending]

    prefill.script = script
    for path, prompt in ((CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (COMPLETIONS, {"prompt": "hi"})):
        body = prompt | {"kv_transfer_params": held, "ec_transfer_params": {}}
        status, answer = await prefill.post(path, body)
        assert status == 200
        assert answer["kv_transfer_params"] == held | {"remote_block_ids": [[1]]}
        events = await prefill.stream(path, body | {"stream_options": {"include_usage": True}})
        with_params = [event for event in events if "kv_transfer_params" in event]
        assert with_params == [event for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
        assert len(with_params) == 1


async def test_missing_handoff_is_counted(prefill: Stage) -> None:
    status, _ = await prefill.chat(kv_transfer_params={"do_remote_decode": True})
    assert status == 200
    assert b'backhaul_engine_kv_handoff_missing_total{endpoint="chat",engine="0",model_name="tiny"} 1.0' in (
        prefill.metrics.exposition()
    )


async def test_decode_leg_uses_the_given_ids_and_never_tokenizes(decode: Stage) -> None:
    ids = list(range(20))
    status, answer = await decode.chat(kv_transfer_params=params_for_decode(prompt_token_ids=ids))
    assert status == 200
    (request,) = decode.submitted
    assert request.prompt_token_ids == ids
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params.prompt_token_ids is None
    assert "prompt_token_ids" not in request.kv_transfer_params.to_json()
    assert decode.tokenizer.calls == 0
    assert answer["usage"]["prompt_tokens"] == 20
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert decode.transport.released == []


async def test_ids_without_remote_prefill_are_ignored(decode: Stage) -> None:
    status, _ = await decode.chat(kv_transfer_params={"prompt_token_ids": [1, 2, 3]})
    assert status == 200
    assert decode.submitted[0].prompt_token_ids != [1, 2, 3]
    assert decode.submitted[0].kv_transfer_params == KVTransferParams()


@pytest.mark.parametrize("ids", [[], [-1], [1.5], [1.0], ["1"], [True], "abc", 5, [320]])
async def test_bad_ids_are_refused_and_the_blocks_released(decode: Stage, ids: object) -> None:
    status, answer = await decode.chat(kv_transfer_params=params_for_decode(prompt_token_ids=ids))
    assert status == 400
    assert "prompt_token_ids" in answer["error"]["message"]
    assert decode.transport.released == [OWNER]


LONG = "x" * MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"model": 5}, 400),
        ({"temperature": -1}, 400),
        ({"n": 0}, 400),
        ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": LONG}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        ({"chat_template_kwargs": {"messages": []}}, 400),
        ({"stop_token_ids": [999]}, 400),
        ({"unknown": "x" * LARGE_BODY, "temperature": -1}, 400),
        ({"ec_transfer_params": {"an-image": 5}}, 400),
        ({"kv_transfer_params": params_for_decode(remote_num_tokens=90)}, 400),
        ({"kv_transfer_params": params_for_decode(remote_block_ids="gone")}, 400),
        ({"kv_transfer_params": params_for_decode(do_remote_decode=True)}, 400),
        ({"kv_transfer_params": params_for_decode(prompt_token_ids=[0] * MAX_MODEL_LEN)}, 400),
        ({"logit_bias": {"999": 1.0}}, 400),
    ],
)
async def test_whatever_a_decode_leg_is_refused_for_its_blocks_are_released_once(
    decode: Stage, change: dict[str, Any], status: int
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "kv_transfer_params": params_for_decode()} | change
    got, answer = await decode.post(CHAT, body)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert decode.transport.released == [OWNER]
    assert decode.submitted == []


async def test_completions_release_too(decode: Stage) -> None:
    params = params_for_decode()
    status, answer = await decode.post(COMPLETIONS, {"prompt": ["a", "b"], "kv_transfer_params": params})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert decode.transport.released == [OWNER]


async def test_refusals_for_want_of_room_release_too(decode: Stage) -> None:
    decode.worker.draining = True
    status, _ = await decode.chat(kv_transfer_params=params_for_decode())
    assert status == 503
    assert decode.transport.released == [OWNER]


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        params_for_decode(remote_host=None),
        params_for_decode(remote_port="8100"),
        params_for_decode(remote_block_ids=[[], []]),
    ],
)
async def test_refused_params_that_name_no_owner_release_nothing(decode: Stage, params: dict[str, Any]) -> None:
    status, answer = await decode.chat(model="nobody", kv_transfer_params=params)
    assert status == 404
    assert "nobody" in answer["error"]["message"]
    assert decode.transport.released == []


async def test_roles_take_their_own_legs_only(decode: Stage, prefill: Stage, stage: Stage) -> None:
    for server, params in (
        (decode, {"do_remote_decode": True}),
        (prefill, params_for_decode()),
        (stage, {"do_remote_decode": True}),
    ):
        status, answer = await server.chat(kv_transfer_params=params)
        assert status == 400
        assert answer["error"]["param"].startswith("kv_transfer_params")


async def test_too_long_prompt_says_both_numbers(stage: Stage) -> None:
    status, answer = await stage.post(COMPLETIONS, {"prompt": [1] * MAX_MODEL_LEN})
    error = answer["error"]
    assert status == 400
    assert error["code"] == "context_length_exceeded"
    assert f"context holds {MAX_MODEL_LEN} tokens" in error["message"]
    assert f"the prompt has {MAX_MODEL_LEN}" in error["message"]


async def test_hopelessly_long_text_is_refused_without_tokenizing_it(stage: Stage) -> None:
    calls = stage.tokenizer.calls
    status, answer = await stage.post(COMPLETIONS, {"prompt": "x" * 50_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert stage.tokenizer.calls == calls


async def test_max_tokens_is_cut_to_the_room_there_is(stage: Stage) -> None:
    await stage.post(COMPLETIONS, {"prompt": [1] * (MAX_MODEL_LEN - 3), "max_tokens": 100})
    await stage.chat()
    assert stage.submitted[0].sampling.max_tokens == 3
    assert stage.submitted[1].sampling.max_tokens == MAX_MODEL_LEN - stage.submitted[1].num_prompt_tokens


@pytest.mark.parametrize("prompt", ["", [320]])
async def test_prompts_the_model_cannot_take(stage: Stage, prompt: object) -> None:
    status, answer = await stage.post(COMPLETIONS, {"prompt": prompt})
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"prompt": "\\ud800"}']
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/kv/claim", "/kv/release"])
async def test_malformed_json_is_400(prefill: Stage, path: str, body: bytes) -> None:
    status, answer = await prefill.post(path, data=body)
    assert status == 400
    assert answer["error"]["type"] == "BadRequestError"


async def test_too_large_a_body_is_413_and_json(stage: Stage) -> None:
    for options in ({"data": b" " * 100_001}, {"data": gzip.compress(b" " * 2_000_000)}):
        headers = {"Content-Encoding": "gzip"} if options["data"][:1] == b"\x1f" else {}
        status, answer = await stage.post(CHAT, headers=headers, **options)
        assert status == 413
        assert "100000 bytes" in answer["error"]["message"]


async def test_body_that_does_not_decompress_is_400(stage: Stage) -> None:
    status, answer = await stage.post(CHAT, data=b"plain", headers={"Content-Encoding": "gzip"})
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")


async def test_connection_of_a_body_that_does_not_decompress_is_closed(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it ends is unknown, so no request can follow. The fault is the client's: no traceback."""
    options: dict[str, Any] = {"data": b"plain" * 1000, "headers": {"Content-Encoding": "gzip"}}
    async with stage.session.post(CHAT, **options) as answer:
        assert answer.headers["Connection"] == "close"
    assert (await stage.chat())[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_unknown_routes_and_methods(stage: Stage) -> None:
    status, answer = await stage.post("/v1/nothing")
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    async with stage.session.get(CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == 405


async def test_request_id_is_honoured_and_made_up(stage: Stage) -> None:
    async with stage.session.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["id"] == "cmpl-mine"
    async with stage.session.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "x" * 500}) as response:
        assert len(response.headers["X-Request-Id"]) == 32
    async with stage.session.post(
        COMPLETIONS, json={"prompt": "a", "stream": True}, headers={"X-Request-Id": "mine"}
    ) as response:
        assert response.headers["X-Request-Id"] == "mine"
    ids = [request.request_id for request in stage.submitted]
    assert ids[0].startswith("cmpl-mine-")
    assert len(set(ids)) == 3


async def test_full_queue_is_503_with_retry_after(tiny_model: Path) -> None:
    async with Stage(tiny_model, capacity=1) as stage:
        stage.script = lambda request: []
        hanging = asyncio.create_task(stage.chat())
        await eventually(lambda: len(stage.submitted) == 1)
        async with stage.session.post(COMPLETIONS, json={"prompt": "a"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "ServiceUnavailableError"
        hanging.cancel()
        await eventually(lambda: stage.client.num_open == 0)


@pytest.mark.parametrize("streaming", [False, True])
async def test_client_that_leaves_aborts_its_request(stage: Stage, streaming: bool) -> None:
    stage.script = lambda request: [Output(request.request_id, byte_ids("a"))] if streaming else []
    body = {"prompt": "hi", "stream": streaming}
    if streaming:
        async with stage.session.post(COMPLETIONS, json=body) as response:
            await response.content.readline()
            response.close()
    else:
        with pytest.raises(TimeoutError):
            await stage.session.post(COMPLETIONS, json=body, timeout=aiohttp.ClientTimeout(total=0.2))
    await eventually(lambda: [stop.aborted for stop in stage.stops] == [True])
    assert stage.client.num_open == 0
    assert b'finished_reason="abort",model_name="tiny"} 1.0' in stage.metrics.exposition()


async def test_blocks_offered_to_a_client_that_left_are_released(prefill: Stage) -> None:
    prefill.script = lambda request: []
    with pytest.raises(TimeoutError):
        await prefill.session.post(COMPLETIONS, json={"prompt": "a"}, timeout=aiohttp.ClientTimeout(total=0.2))
    await eventually(lambda: len(prefill.stops) == 1)
    request = prefill.submitted[0]
    params = params_for_decode(remote_request_id=request.request_id)
    ending = Output(request.request_id, [1], "length", kv_transfer_params=KVTransferParams.parse(params))
    prefill.client.emit([ending])
    await eventually(lambda: prefill.other == [LeaseReleased(request.request_id)])


async def test_error_before_the_first_token_has_its_status(stage: Stage) -> None:
    stage.script = lambda request: [Output(request.request_id, [], "error", error="no KV", error_status=500)]
    for streaming in (False, True):
        status, answer = await stage.chat(stream=streaming)
        assert status == 500
        assert answer["error"]["message"] == "no KV"
    stage.script = lambda request: [Output(request.request_id, [], "error", error="bad", error_status=400)]
    assert (await stage.chat())[0] == 400


async def test_error_in_the_middle_is_an_event_before_done(stage: Stage) -> None:
    # Outputs that arrive together are one to the reader, so the second waits until the first has passed.
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def script(request: Any) -> Any:
        yield Output(request.request_id, byte_ids("a"))
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(5)
        yield Output(request.request_id, [], "error", error="broke")

    stage.script = script
    async with stage.session.post(COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
        assert response.status == 200
        assert b'"text":"a"' in await response.content.readuntil(b"\n\n")
        gate.set()
        rest = await response.read()
    assert rest.startswith(b'data: {"error":{"message":"broke"')
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_dead_engine_fails_open_and_later_requests(stage: Stage) -> None:
    stage.script = lambda request: []
    hanging = asyncio.create_task(stage.chat())
    await eventually(lambda: len(stage.submitted) == 1)
    stage.client.fail("the engine failed")
    assert (await hanging)[0] == 500
    assert (await stage.chat())[0] == 503


async def test_slow_reader_gets_everything(stage: Stage) -> None:
    stage.script = says("all of this text " * 10)
    _, answer = await stage.post(COMPLETIONS, {"prompt": "a"})
    assert answer["choices"][0]["text"] == "all of this text " * 10
    assert answer["usage"]["completion_tokens"] == 170


async def test_status_routes_while_loading_and_draining(stage: Stage) -> None:
    async def statuses() -> list[int]:
        return [(await stage.session.get(path)).status for path in ("/health", "/ping", "/v1/models", "/metrics")]

    assert await statuses() == [200] * 4
    stage.worker.draining = True
    assert await statuses() == [503, 503, 503, 200]
    stage.worker.draining, stage.worker.serving = False, None
    assert await statuses() == [503] * 4
    assert (await stage.chat())[0] == 503
    assert (await stage.session.get("/version")).status == 200


async def test_models(stage: Stage) -> None:
    async with stage.session.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("tiny", MAX_MODEL_LEN, "model")
    async with stage.session.get("/v1/models/tiny") as response:
        assert await response.json() == model
    async with stage.session.get("/v1/models/other") as response:
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_tokenize_and_back(stage: Stage) -> None:
    status, answer = await stage.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert await stage.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "hé"})
    assert (await stage.post("/detokenize", {"tokens": [320]}))[0] == 400
    assert (await stage.post("/tokenize", {"prompt": "a", "model": "nobody"}))[0] == 404


async def test_tokenize_messages_gives_the_prompt_of_a_chat(stage: Stage) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    _, answer = await stage.post("/tokenize", {"messages": messages})
    await stage.chat(messages=messages)
    assert stage.submitted[0].prompt_token_ids == answer["tokens"]


async def test_kv_routes(prefill: Stage) -> None:
    async with prefill.session.get("/kv/agent") as response:
        assert (await response.json())["engine_id"] == ENGINE_ID
    prefill.leases.hold("r", [1, 2], ["aa", "bb"], 30)
    prefill.leases.hold("s", [3], ["cc"], 30)
    names = {"engine_id": ENGINE_ID, "request_id": "r"}
    assert await prefill.post("/kv/renew", {"engine_id": ENGINE_ID, "request_ids": ["r", "x"]}) == (200, {"renewed": 1})
    status, claim = await prefill.post("/kv/claim", names | {"reader": "d"})
    claim_id = claim.pop("claim_id")
    assert (status, claim) == (200, {"valid_for": 10, "block_ids": [1, 2], "block_hashes": ["aa", "bb"]})
    status, answer = await prefill.post("/kv/claim", names)
    assert (status, answer["error"]["code"]) == (410, "lease_claimed")
    assert await prefill.post("/kv/release", names | {"request_id": "s"}) == (200, {"released": True})
    assert await prefill.post("/kv/release", names | {"request_id": "x"}) == (200, {"released": False})
    assert await prefill.post("/kv/release", names) == (200, {"released": False}), "someone reads"
    assert await prefill.post("/kv/release", names | {"claim_id": "x"}) == (200, {"released": False})
    assert await prefill.post("/kv/release", names | {"claim_id": claim_id}) == (200, {"released": True})
    await eventually(lambda: prefill.other == [LeaseReleased("s"), LeaseReleased("r")])
    for path in ("claim", "release", "renew"):
        status, answer = await prefill.post(f"/kv/{path}", names | {"engine_id": "other", "request_ids": []})
        assert (status, answer["error"]["code"]) == (409, "engine_mismatch")
    assert (await prefill.post("/kv/claim", {"engine_id": ENGINE_ID}))[0] == 400


async def test_kv_routes_work_while_draining_but_not_without_a_connector(prefill: Stage, stage: Stage) -> None:
    prefill.worker.draining = True
    assert (await prefill.session.get("/kv/agent")).status == 200
    assert (await stage.session.get("/kv/agent")).status == 404


async def test_salt_separates_caches(stage: Stage) -> None:
    prompt = [1] * (2 * BLOCK_SIZE)
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
        assert (await stage.post(COMPLETIONS, {"prompt": prompt} | salt))[0] == 200
    names = [request.block_hashes[0] for request in stage.submitted]
    assert names[1] == names[3]
    assert len(set(names)) == 3


async def test_tool_messages_reach_the_template(stage: Stage) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "result", "tool_call_id": "1"},
    ]
    status, _ = await stage.chat(messages=messages)
    assert status == 200
    prompt = stage.tokenizer.decode(stage.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert "result" in prompt


@pytest.mark.parametrize(
    "key",
    ["self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_template_arguments_that_clash_are_refused_by_name(stage: Stage, path: str, key: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {key: 1}}
    status, answer = await stage.post(path, body)
    assert (status, answer["error"]["param"]) == (400, f"chat_template_kwargs.{key}")


async def test_other_template_arguments_are_taken(stage: Stage) -> None:
    assert (await stage.chat(chat_template_kwargs={"variables": 1, "enable_thinking": False, "not a name": 2}))[
        0
    ] == 200


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [200, 900, 1020])
@pytest.mark.parametrize(
    "field",
    [
        '"messages": [{"role": "user", "content": "hi", "extra": %s}]',
        '"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": %s}}]}]',
        '"messages": [{"role": "user", "content": %s}]',
        '"messages": [{"role": "user", "content": "hi"}], "unknown": %s',
        '"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": %s}',
        '"messages": [{"role": "user", "content": "hi"}], "documents": [{"a": %s}]',
        '"messages": [{"role": "user", "content": "hi"}], "kv_transfer_params": {"do_remote_decode": true, "a": %s}',
        '"messages": [{"role": "user", "content": "hi"}], "ec_transfer_params": {"a": {"b": %s}}',
        '"prompt": %s',
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
async def test_values_nested_absurdly_deep_are_400(prefill: Stage, path: str, field: str, depth: int) -> None:
    status, _ = await prefill.post(path, data="{" + field % nested(depth) + "}")
    assert status == 400


async def test_brackets_without_end_are_refused_unparsed(tiny_model: Path) -> None:
    async with Stage(tiny_model, max_body_bytes=2_000_000) as stage:
        status, answer = await stage.post(CHAT, data=io.BytesIO(b'{"unknown": [' + b"[]," * (1 << 19) + b"[]]}"))
    assert status == 400
    assert "at most 524288" in answer["error"]["message"]


async def test_tool_call_arguments_nested_too_deep_are_400(stage: Stage) -> None:
    arguments = '{"a":' * 1020 + "1" + "}" * 1020
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    status, answer = await stage.chat(messages=messages)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "nested too deep" in answer["error"]["message"]


async def test_peers_are_answered_while_a_large_body_is_worked_on(
    prefill: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(body: Any) -> ChatBody:
        entered.set()
        assert leave.wait(10)
        return parse_chat(body)

    monkeypatch.setattr(chat_api, "parse_chat", slow)
    prefill.leases.hold("r", [1], ["aa"], 30)
    large = asyncio.create_task(prefill.chat(unknown="x" * LARGE_BODY))
    try:
        await eventually(entered.is_set)
        names = {"engine_id": ENGINE_ID, "request_id": "r"}
        async with asyncio.timeout(5):
            assert (await prefill.post("/kv/claim", names))[0] == 200
            assert (await prefill.session.get("/health")).status == 200
        assert not large.done()
    finally:
        leave.set()
    assert (await large)[0] == 200


async def test_large_and_small_bodies_give_the_same_prompt(stage: Stage) -> None:
    for padding in ("", "x" * LARGE_BODY):
        assert (await stage.chat(unknown=padding))[0] == 200
        assert (await stage.post(COMPLETIONS, {"prompt": ["a", "bc"], "unknown": padding}))[0] == 200
    small, large = stage.submitted[:3], stage.submitted[3:]
    assert [r.prompt_token_ids for r in small] == [r.prompt_token_ids for r in large]


async def test_malformed_http_leaves_no_traceback_in_the_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    host, port = stage.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.INFO, logger="aiohttp.server"):
        for request in (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\rb\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            async with asyncio.timeout(5):
                assert b" 400 " in await reader.readline()
            writer.close()
    assert [record for record in caplog.records if record.name == "aiohttp.server"] == []
    logging.getLogger("aiohttp.server").error("a real one")
    assert "a real one" in caplog.text

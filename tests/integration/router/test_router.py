"""A turn through the router: what each engine is asked, and what the client gets."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from aiohttp import web
from redis.asyncio import Redis

from connectors.wire import sse
from connectors.wire.transfer import KVTransferParams
from tests.router_harness import CHAT, COMPLETION, Front, router_over, until
from tests.stub_engine import OUTPUT_IDS, PROMPT_IDS, TEXT, StubEngine

INTERNAL = (b"kv_transfer_params", b"ec_transfer_params", b"token_ids", b"remote_", b"layout-1")


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_turn(front: Front, p: StubEngine, d: StubEngine, body: dict[str, Any], stream: bool) -> None:
    asked = {**body, "stream": stream, "max_tokens": 50, "temperature": 0.3, "zz_unknown": [1]}
    answer = await front.post(asked, headers={"X-Request-Id": "turn-1", "Authorization": "Bearer key"})
    assert answer.status == 200
    assert not any(name in answer.raw for name in INTERNAL)
    if stream:
        assert answer.text == TEXT
        assert answer.events[-1] == "[DONE]"
        assert all("usage" not in event and event["choices"] for event in answer.events[:-1])
    else:
        choice = answer.json["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) == TEXT
        assert answer.json["usage"]["completion_tokens"] == 6
    [to_p], [to_d] = p.seen, d.seen
    assert (to_p.body["max_tokens"], to_p.body["stream"]) == (1, False)
    assert to_p.body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    sent = dict(to_d.body)
    params = sent.pop("kv_transfer_params")
    assert params["remote_engine_id"] == "prefill-engine"
    if body is CHAT:
        assert params["prompt_token_ids"] == PROMPT_IDS
    else:
        assert sent.pop("prompt") == PROMPT_IDS
        asked.pop("prompt")
    assert sent.pop("token_note") == "output", "it knows the prompt"
    assert sent.pop("stream_options", None) == ({"include_usage": True} if stream else None)
    assert sent == asked
    for leg in (to_p, to_d):
        assert leg.headers["X-Request-Id"] == "turn-1"
        assert leg.headers["Authorization"] == "Bearer key"


async def test_client_gets_the_ids_and_usage_it_asked_for(front: Front) -> None:
    asked = {**CHAT, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    events = (await front.post(asked)).events
    assert events[0]["prompt_token_ids"] == PROMPT_IDS
    assert [event["choices"][0]["token_ids"][0] for event in events[1:-2]] == OUTPUT_IDS
    assert events[-2]["usage"]["completion_tokens"] == 6
    assert b"kv_transfer_params" not in (await front.post(asked)).raw


async def test_each_event_is_passed_on_before_the_next_is_made(front: Front, d: StubEngine) -> None:
    """Nothing on the way waits for more: the engine makes an event only when the client has the one before."""
    events = d.events({**CHAT, "return_token_ids": True, "kv_transfer_params": {"do_remote_prefill": True}})
    received = asyncio.Semaphore(0)

    async def one_by_one(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            if event != sse.DONE_EVENT:
                await asyncio.wait_for(received.acquire(), 5)
        return response

    d.scripts.append(one_by_one)
    parser = sse.SSEParser()
    seen = 0
    async with front.client.post(front.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        async for chunk in answer.content.iter_any():
            for _ in parser.feed(chunk):
                seen += 1
                received.release()
    assert seen == len(events)


async def test_stream_cut_at_every_byte_reaches_the_client_whole(front: Front, p: StubEngine, d: StubEngine) -> None:
    stream = b"".join(d.events({**CHAT, "return_token_ids": True}))

    async def bytewise(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, [bytes([byte]) for byte in stream])

    d.scripts.append(bytewise)
    expected = (await front.post({**CHAT, "stream": True, "conversation_id": "plain"})).raw
    d.scripts.append(bytewise)
    assert (await front.post({**CHAT, "stream": True})).raw == expected
    assert TEXT.encode() in expected or "👋".encode() in expected


@pytest.mark.parametrize("stream", [False, True])
async def test_turn_is_remembered_before_the_client_knows_it_is_over(
    front: Front, p: StubEngine, d: StubEngine, redis_url: str, stream: bool
) -> None:
    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
        await front.post({**CHAT, "stream": stream})
        [key] = await redis.keys("*")
        assert 0 < await redis.ttl(key) <= 450
    found = await front.router.store.claim(key.decode())
    assert found is not None
    assert found.record.token_ids.tolist() == [*PROMPT_IDS, *OUTPUT_IDS]
    assert (found.record.turn, found.record.prefill, found.record.decode) == (1, p.url, d.url)
    assert found.offer is not None
    assert found.offer.remote_engine_id == "decode-engine"
    assert await front.router.store.put_back(found)
    explained = (await front.post(next_turn(), headers={"X-Backhaul-Explain": "1"})).explain
    assert (explained["turn"], explained["reason"], explained["decode"]) == (2, "affinity", d.url)


def next_turn() -> dict[str, Any]:
    answer = {"role": "assistant", "content": TEXT}
    return {**CHAT, "messages": [*CHAT["messages"], answer, {"role": "user", "content": "Go on"}]}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({**COMPLETION, "conversation_id": "c-1"}, {}),
        (COMPLETION, {"X-Conversation-Id": "c-2"}),
        (CHAT, {"x-session-id": "c-3"}),
        ({**CHAT, "stream": True}, {"X-Session-ID": "c-4"}),
    ],
)
async def test_named_conversation_goes_on(
    front: Front, p: StubEngine, body: dict[str, Any], headers: dict[str, str]
) -> None:
    for turn in (1, 2, 3):
        answer = await front.post(body, headers={**headers, "X-Backhaul-Explain": "1"})
        assert answer.explain["turn"] == turn
    assert all("conversation_id" not in seen.body for seen in p.seen)


async def test_conversation_stays_on_its_engines(redis_url: str) -> None:
    async with (
        StubEngine("prefill").running() as p1,
        StubEngine("prefill").running() as p2,
        StubEngine("decode").running() as d1,
        StubEngine("decode").running() as d2,
        router_over([p1, p2], [d1, d2], redis_url) as front,
    ):
        for name in ("a", "b"):
            for _ in range(3):
                await front.post({**CHAT, "conversation_id": name + redis_url})
        assert [len(engine.seen) for engine in (p1, p2, d1, d2)] == [3, 3, 3, 3]


async def test_one_body_of_a_megabyte_in_small_pieces(front: Front, d: StubEngine, redis_url: str) -> None:
    async def big(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        whole = d.whole(body)
        whole["choices"][0]["message"]["content"] = "é" * 500_000
        whole["choices"][0]["message"]["tool_calls"] = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
        whole["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": -0.1}]}
        data = json.dumps(whole).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for start in range(0, len(data), 4096):
            await response.write(data[start : start + 4096])
        return response

    d.scripts.append(big)
    answer = await front.post({**CHAT, "conversation_id": "big"})
    choice = answer.json["choices"][0]
    assert choice["message"]["content"] == "é" * 500_000
    assert choice["message"]["tool_calls"][0]["id"] == "c"
    assert choice["logprobs"]["content"][0]["logprob"] == -0.1
    again = await front.post({**CHAT, "conversation_id": "big"}, headers={"X-Backhaul-Explain": "1"})
    assert again.explain["turn"] == 2


async def test_several_choices_share_one_prefill_on_our_engines(front: Front, p: StubEngine, d: StubEngine) -> None:
    answer = await front.post({**CHAT, "n": 3})
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    assert (p.bodies[0]["n"], d.bodies[0]["n"]) == (1, 3)
    assert d.bodies[0]["kv_transfer_params"]["do_remote_prefill"] is True
    assert not any(name in answer.raw for name in INTERNAL)


async def test_several_choices_are_made_by_others_decode_engines_alone(
    front: Front, p: StubEngine, d: StubEngine
) -> None:
    d.owned_by = "vllm"
    await until(lambda: not front.router.pool.decodes_ours("m"), "the router has looked")
    answer = await front.post({**CHAT, "n": 3}, headers={"X-Backhaul-Explain": "1"})
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    assert answer.explain["reason"] == "several_choices"
    assert not p.seen, "nothing is held on P that only one of three could release"
    assert d.bodies[0]["n"] == 3
    assert "kv_transfer_params" not in d.bodies[0]
    assert not any(name in answer.raw for name in INTERNAL)


async def test_several_prompts_are_made_by_the_decode_engine_alone(front: Front, p: StubEngine, d: StubEngine) -> None:
    await front.post({**COMPLETION, "prompt": ["a", "b"]})
    assert not p.seen
    assert d.bodies[0]["prompt"] == ["a", "b"]


async def test_clients_cannot_speak_engine(front: Front, p: StubEngine, d: StubEngine) -> None:
    forged = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "prompt_token_ids": [666]}
    await front.post(
        {
            **CHAT,
            "kv_transfer_params": forged,
            "ec_transfer_params": {"h": {}},
            "vllm_xargs": {"kv_transfer_params": forged, "ec_transfer_params": {}},
            "sampling_params": {"extra_args": {"kv_transfer_params": forged}},
        },
        headers={"X-Data-Parallel-Rank": "3"},
    )
    for engine in (p, d):
        text = json.dumps(engine.bodies)
        assert "666" not in text
        assert "10.0.0.1" not in text
        assert "ec_transfer_params" not in text
        assert "X-Data-Parallel-Rank" not in engine.seen[0].headers


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"remote_port": "x"}, "text"])
async def test_prefill_answer_without_usable_params(front: Front, p: StubEngine, d: StubEngine, params: object) -> None:
    async def without(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({**p.whole(body), "kv_transfer_params": params})

    p.scripts.append(without)
    before = await front.metric("backhaul_router_kv_handoff_missing_total", endpoint="chat")
    assert (await front.post(CHAT)).status == 200
    alone = KVTransferParams.for_decode_alone().with_(prompt_token_ids=PROMPT_IDS, remote_blocks_ttl=480.0)
    assert d.bodies[0]["kv_transfer_params"] == alone.to_json()
    assert await front.metric("backhaul_router_kv_handoff_missing_total", endpoint="chat") == before + 1


async def test_headers_of_the_answer(front: Front, d: StubEngine) -> None:
    async def with_headers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"X-Request-Id": "theirs", "Server": "uvicorn", "Connection": "close, X-Hop", "X-Hop": "1"}
        return web.json_response(d.whole(body), headers={**headers, "X-Engine-Says": "hello"})

    d.scripts.append(with_headers)
    answer = await front.post(CHAT, headers={"X-Request-Id": "mine"})
    for name in ("Server", "Date", "Content-Type", "X-Request-Id"):
        assert len(answer.headers.getall(name)) == 1, name
    assert answer.headers["X-Request-Id"] == "mine"
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["X-Engine-Says"] == "hello"
    assert "X-Hop" not in answer.headers
    stream = await front.post({**CHAT, "stream": True})
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert stream.headers["X-Request-Id"] == d.seen[-1].headers["X-Request-Id"]


async def test_one_log_line_per_turn_without_anything_private(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await front.post({**CHAT, "messages": [{"role": "user", "content": "my secret"}]}, headers={"X-Request-Id": "r-7"})
    [line] = [record for record in caplog.records if record.name == "router.turn"]
    assert (line.request_id, line.outcome, line.status, line.model) == ("r-7", "ok", 200, "m")
    everything = " ".join(str(vars(record)) for record in caplog.records)
    assert "my secret" not in everything
    assert TEXT not in everything


@pytest.mark.parametrize("stream", [False, True])
async def test_compressed_answers_reach_the_client_readable(front: Front, d: StubEngine, stream: bool) -> None:
    async def compressed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = "text/event-stream" if stream else "application/json"
        data = b"".join(d.events(body)) if stream else json.dumps(d.whole(body)).encode()
        headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
        return web.Response(body=gzip.compress(data), headers=headers)

    d.scripts.append(compressed)
    answer = await front.post({**CHAT, "stream": stream}, headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in answer.headers
    assert (answer.text if stream else answer.json["choices"][0]["message"]["content"]) == TEXT


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_requests_are_understood(front: Front, p: StubEngine, encoding: str, pack: Any) -> None:
    answer = await front.post(
        pack(json.dumps(CHAT).encode()), path="/v1/chat/completions", headers={"Content-Encoding": encoding}
    )
    assert answer.status == 200
    assert p.bodies[0]["messages"] == CHAT["messages"]
    assert "Content-Encoding" not in p.seen[0].headers


async def test_unknown_encoding_is_415(front: Front) -> None:
    answer = await front.post(b"x", path="/v1/chat/completions", headers={"Content-Encoding": "br"})
    assert answer.status == 415
    assert "br" in answer.error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"model": 5, "messages": []}', "model"),
        (b'{"model": "m", "conversation_id": 5}', "conversation_id"),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)
async def test_bad_body_is_400(front: Front, p: StubEngine, body: bytes, param: str | None) -> None:
    answer = await front.post(body, path="/v1/chat/completions")
    assert answer.status == 400
    assert answer.error["param"] == param
    assert not p.seen


async def test_corrupt_compressed_body_is_400(front: Front) -> None:
    answer = await front.post(b"no gzip", path="/v1/chat/completions", headers={"Content-Encoding": "gzip"})
    assert answer.status == 400
    assert answer.error["message"]


async def test_body_of_twenty_megabytes_passes(front: Front, d: StubEngine) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (20 << 20)}}
    answer = await front.post({**CHAT, "messages": [{"role": "user", "content": [picture]}]})
    assert answer.status == 200
    assert d.bodies[0]["messages"][0]["content"] == [picture]
    assert "prompt_token_ids" not in d.bodies[0]["kv_transfer_params"]


async def test_body_above_the_limit_is_413(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with router_over([p], [d], redis_url, max_body_bytes=1000) as front:
        answer = await front.post({**CHAT, "pad": "x" * 2000})
        assert answer.status == 413
        assert "1000 bytes" in answer.error["message"]
        bomb = gzip.compress(json.dumps({**CHAT, "pad": "x" * 100_000}).encode())
        answer = await front.post(bomb, path="/v1/chat/completions", headers={"Content-Encoding": "gzip"})
        assert answer.status == 413
        assert (await front.post(CHAT)).status == 200


async def test_model_may_be_left_out_when_there_is_one(front: Front, redis_url: str) -> None:
    body = {"messages": CHAT["messages"], "conversation_id": "unsaid"}
    assert (await front.post(body)).status == 200
    again = await front.post({**body, "model": "m"}, headers={"X-Backhaul-Explain": "1"})
    assert again.explain["turn"] == 2, "it is the same model's conversation"


async def test_models(front: Front) -> None:
    card = {"id": "m", "max_model_len": 4096, "owned_by": "backhaul"}
    assert (await front.get("/v1/models")).json == {"object": "list", "data": [card]}
    assert (await front.get("/v1/models/m")).json["id"] == "m"
    assert (await front.get("/v1/models/x/y")).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/nothing", 404), ("GET", "/", 404)],
)
async def test_other_routes_have_openai_errors(front: Front, method: str, path: str, status: int) -> None:
    async with front.client.request(method, front.url + path) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["code"] == status
        assert ("Allow" in answer.headers) == (status == 405)
        assert answer.headers["X-Request-Id"]


async def test_many_streams_at_once(front: Front, d: StubEngine) -> None:
    """All are under way before any may end: neither a connection limit nor a queue is in between."""
    count = 150
    everyone = asyncio.Barrier(count)

    async def together(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await everyone.wait()
        return await d.play(request, d.events(body))

    d.scripts.extend([together] * count)
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*(front.post({**CHAT, "stream": True}) for _ in range(count)))
    assert all(answer.text == TEXT for answer in answers)
    await until(front.is_idle, "idle")


async def test_end_is_passed_on_before_the_engine_closes(front: Front, d: StubEngine) -> None:
    release = asyncio.Event()

    async def linger(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(d.events(body)))
        await release.wait()
        return response

    d.scripts.append(linger)
    assert (await front.post({**CHAT, "stream": True})).events[-1] == "[DONE]"
    release.set()


async def test_connections_are_used_again(front: Front, p: StubEngine, d: StubEngine) -> None:
    async def end_late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(d.events(body)))
        await asyncio.sleep(0.02)  # the end of the chunked body comes in a packet of its own
        return response

    for number, stream in enumerate((True, False) * 5):
        if stream:
            d.scripts.append(end_late)
        await front.post({**CHAT, "conversation_id": f"{number}", "stream": stream})
        await until(front.is_settled, "settled")
    assert len(p.connections) == 1
    assert len(d.connections) == 1


async def test_junk_does_not_grow_the_metrics(front: Front) -> None:
    async def series() -> int:
        return len((await front.get("/metrics")).raw.splitlines())

    async def junk(number: int) -> None:
        await front.post({**CHAT, "model": f"model-{number}", "conversation_id": f"c-{number}"})
        await front.get(f"/path-{number}")
        await front.post(
            {**CHAT, "conversation_id": f"c-{number}"}, headers={"X-Request-Id": f"r-{number}", f"X-{number}": "1"}
        )

    await junk(-1)  # all that a turn does is known from here on
    await until(front.is_settled, "settled")
    before = await series()
    for number in range(60):
        await junk(number)
    await until(front.is_settled, "settled")
    assert await series() < before + 20
    assert await front.metric("backhaul_router_turns_total", outcome="rejected") == 61
    assert await front.metric("backhaul_router_turns_total", outcome="ok") == 61


async def test_tokens_are_counted(front: Front) -> None:
    await front.post(CHAT)
    await front.post({**CHAT, "stream": True})
    assert await front.metric("backhaul_router_tokens_total", kind="prompt") == 8
    assert await front.metric("backhaul_router_tokens_total", kind="completion") == 12


@pytest.mark.parametrize("depth", [260, 1000])
@pytest.mark.parametrize("place", ["message", "option", "dropped for prefill"])
async def test_body_nested_too_deeply_is_400(front: Front, d: StubEngine, depth: int, place: str) -> None:
    key = {"message": b'"messages"', "option": b'"x"', "dropped for prefill": b'"stop"'}[place]
    messages = b"" if place == "message" else b'"messages": [{"role": "user", "content": "Hi"}], '
    deep = b"[" * depth + b"]" * depth
    value = b'[{"role": "user", "content": ' + deep + b"}]" if place == "message" else deep
    answer = await front.post(b'{"model": "m", ' + messages + key + b": " + value + b"}", path="/v1/chat/completions")
    assert answer.status == 400
    assert "nested too deeply" in answer.error["message"]
    assert not d.seen


@pytest.mark.parametrize(
    ("header", "status"),
    [("X-Conversation-Id", 200), ("X-Session-Id", 200), ("X-Other", 200), ("Content-Encoding", 415)],
)
async def test_header_of_any_bytes(front: Front, header: str, status: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rsplit(":", 1)[1]))
    body = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + header.encode() + b": \xff\xfe\r\n\r\n" + body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())

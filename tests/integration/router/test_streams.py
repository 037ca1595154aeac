"""What becomes of an answer on its way, streamed or whole: its bytes, its errors, its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from redis.asyncio import Redis

from connectors.wire import sse
from tests.endpoints import ENDPOINTS, INTERNAL, Endpoint, every_endpoint, streamed_and_whole, with_choices
from tests.router_harness import Front, router_over, until
from tests.stub_engine import OUTPUT_IDS, PROMPT_IDS, Script, StubEngine, hang_up

NAMED = {"X-Conversation-Id": "told"}
Json = dict[str, Any]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
        yield redis


def streams(engine: StubEngine, pieces: list[bytes]) -> Script:
    async def script(request: web.Request, _: Json) -> web.StreamResponse:
        return await engine.play(request, pieces)

    return script


def begins_then(engine: StubEngine, num_events: int, then: list[bytes] | None) -> Script:
    """Sends the first events of its answer, then other bytes; or breaks off the connection."""

    async def script(request: web.Request, body: Json) -> web.StreamResponse:
        return await engine.play(request, [*engine.events(body)[:num_events], *(then or ())], cut=then is None)

    return script


@every_endpoint
async def test_bytes_arrive_as_they_were_sent_however_they_are_cut(
    front: Front, d: StubEngine, redis: Redis, endpoint: Endpoint
) -> None:
    """All but the first and the last event, which have a note for the router in them."""
    d.stream_params = False
    sent = d.events(endpoint.body(stream=True, token_note=True))
    odd = [b": keep-alive\r\n\r\n", b"event: x\rid: 1\rdata: {\r", 'data: "é👋":1}\r\r'.encode(), b"data: 1\n\n"]
    whole = b"".join([*sent[:2], *odd, *sent[2:]])
    d.scripts.append(streams(d, [whole]))
    expected = (await front.post(endpoint.body(stream=True), path=endpoint.path)).raw
    await redis.flushdb()
    d.scripts.append(streams(d, [whole[at : at + 1] for at in range(len(whole))]))
    answer = await front.post(endpoint.body(stream=True), path=endpoint.path, headers=NAMED)
    assert answer.raw == expected
    assert b"".join([*sent[1:2], *odd, *sent[2:-3]]) in expected
    assert not any(key in expected for key in INTERNAL)
    [key] = await redis.keys("*")
    found = await front.router.store.claim(key.decode())
    assert found is not None
    assert found.record.token_ids.tolist()[-len(OUTPUT_IDS) :] == OUTPUT_IDS


@every_endpoint
@streamed_and_whole
async def test_status_and_words_of_an_error_before_the_first_byte(
    front: Front, d: StubEngine, endpoint: Endpoint, stream: bool
) -> None:
    error = {"message": "no such thing", "type": "TestError", "param": "p", "code": 422}

    async def refuses(_: web.Request, __: Json) -> web.StreamResponse:
        return web.json_response({"error": error}, status=422)

    d.scripts.append(refuses)
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path)
    assert (answer.status, answer.error) == (422, error)
    assert answer.headers["Content-Type"].startswith("application/json")


@every_endpoint
@pytest.mark.parametrize("together", [True, False], ids=["one read", "two reads"])
async def test_error_as_the_first_event_has_a_status(
    front: Front, d: StubEngine, endpoint: Endpoint, together: bool
) -> None:
    told: list[Json] = [{"error": {"message": "too long", "type": "T", "param": "p", "code": 400}}]
    if endpoint.name == "responses":
        failed = {"status": "failed", "error": {"code": "server_error", "message": "too long"}}
        told = [{"type": "error", "code": "400", "message": "too long", "param": None, "sequence_number": 0}]
        told.append({"type": "response.failed", "response": failed})
    pieces = endpoint.pieces(told)
    d.scripts.append(streams(d, [b"".join(pieces)] if together else pieces))
    answer = await front.post(endpoint.body(stream=True), path=endpoint.path)
    assert (answer.status, answer.error["message"], answer.error["code"]) == (400, "too long", 400)


@every_endpoint
@pytest.mark.parametrize("how", ["connection cut", "ends", "unfinished event", "just before the end"])
async def test_cut_stream_ends_with_one_error_and_leaves_nothing(
    front: Front, d: StubEngine, redis: Redis, endpoint: Endpoint, how: str
) -> None:
    then = {"connection cut": None, "ends": [], "unfinished event": [b'data: {"choices": [']}.get(how, [])
    num_events = len(d.events(endpoint.body(stream_options={"include_usage": True}))) - 1
    d.scripts.append(begins_then(d, num_events if how == "just before the end" else 3, then))
    answer = await front.post(endpoint.body(stream=True), path=endpoint.path, headers=NAMED)
    assert answer.status == 200
    told = endpoint.told_error(answer)
    assert str(told["code"]) == "502"
    assert "again" in told["message"]
    assert not endpoint.looks_complete(answer)
    await until(front.is_settled, "settled")
    assert await redis.keys("*") == []
    assert len(d.seen) == 1, "what the client has seen the start of is not made again"
    assert await front.metric("backhaul_router_turns_total", endpoint=endpoint.name, outcome="cut") == 1


@every_endpoint
async def test_error_of_the_engine_in_mid_stream_is_the_last_and_leaves_nothing(
    front: Front, d: StubEngine, redis: Redis, endpoint: Endpoint
) -> None:
    told: list[Json] = [{"error": {"message": "out of memory", "code": 500}}]
    if endpoint.name == "responses":
        told = [{"type": "error", "code": "500", "message": "out of memory", "param": None}]
    pieces = endpoint.pieces(told)
    d.scripts.append(begins_then(d, 3, pieces))
    answer = await front.post(endpoint.body(stream=True), path=endpoint.path, headers=NAMED)
    assert answer.raw.endswith(pieces[0])
    assert endpoint.told_error(answer)["message"] == "out of memory"
    await until(front.is_settled, "settled")
    assert await redis.keys("*") == []
    assert await front.metric("backhaul_router_turns_total", endpoint=endpoint.name, outcome="cut") == 1


@every_endpoint
async def test_engine_that_falls_silent_is_told_as_a_timeout(
    p: StubEngine, d: StubEngine, redis_url: str, endpoint: Endpoint
) -> None:
    async def silent(request: web.Request, body: Json) -> web.StreamResponse:
        await d.play(request, d.events(body)[:2])
        await asyncio.Event().wait()
        raise AssertionError

    async with router_over([p], [d], redis_url, idle_timeout=0.2) as front:
        d.scripts.append(silent)
        answer = await front.post(endpoint.body(stream=True), path=endpoint.path)
    assert str(endpoint.told_error(answer)["code"]) == "504"


async def test_error_event_of_a_response_has_its_place_in_the_sequence(front: Front, d: StubEngine) -> None:
    endpoint = ENDPOINTS["responses"]
    d.scripts.append(begins_then(d, 4, []))
    answer = await front.post(endpoint.body(stream=True), path=endpoint.path)
    assert [event["sequence_number"] for event in answer.events] == [0, 1, 2, 3, 4]


@with_choices
@streamed_and_whole
async def test_several_choices_cost_one_prefill_and_all_come_back(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, stream: bool
) -> None:
    async def three(request: web.Request, body: Json) -> web.StreamResponse:
        if not stream:
            return web.json_response(d.whole(body))
        *events, done = d.events(body)
        bodies = [json.loads(event.removeprefix(b"data: ")) for event in events]
        for number in (1, 2):
            bodies.insert(1, {**bodies[1], "choices": [{**bodies[1]["choices"][0], "index": number}]})
        return await d.play(request, [*(sse.event(each) for each in bodies), done])

    d.scripts.append(three)
    asked = endpoint.limited(n=3) | {"stream": stream}
    answer = await front.post(asked, path=endpoint.path)
    events = answer.events[:-1] if stream else [answer.json]
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1, 2}
    assert [endpoint.sampling(p.bodies[0])["n"], endpoint.sampling(d.bodies[0])["n"]] == [1, 3]
    assert "best_of" not in endpoint.sampling(p.bodies[0])
    assert not any(key in answer.raw for key in INTERNAL)
    assert not p.released
    assert await front.metric("backhaul_router_kv_handoff_missing_total") == 0


COUNTS = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
ZEROS = dict.fromkeys(COUNTS, 0)
LAYOUTS: dict[str, tuple[Json, list[Json | None]]] = {
    "own chunk": ({}, [COUNTS]),
    "finish chunk": ({"usage": COUNTS}, []),
    "both": ({"usage": {**COUNTS, "completion_tokens": 5}}, [COUNTS]),
    "null and zeros never overwrite": ({"usage": COUNTS}, [None, ZEROS]),
}


@with_choices
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("asked", [False, True], ids=["not asked for", "asked for"])
@pytest.mark.parametrize("split", [False, True], ids=["one read", "split"])
async def test_usage_is_counted_wherever_it_stands(
    front: Front, d: StubEngine, endpoint: Endpoint, layout: str, asked: bool, split: bool
) -> None:
    with_finish, after = LAYOUTS[layout]
    choice: Json = {"index": 0, "finish_reason": "stop", "text": "x"}
    said: list[Json] = [
        {"choices": [{"index": 0, "finish_reason": None, "text": "y"}], "usage": None},
        {"choices": [choice], **with_finish},
        *({"choices": [], "usage": usage} for usage in after),
    ]
    stream = [*map(sse.event, said), sse.DONE_EVENT]
    d.scripts.append(streams(d, stream if split else [b"".join(stream)]))
    options = {"stream_options": {"include_usage": True}} if asked else {}
    answer = await front.post(endpoint.body(stream=True, **options), path=endpoint.path)
    assert d.bodies[0]["stream_options"] == {"include_usage": True}
    if asked:
        assert answer.raw == b"".join(stream)
    else:
        assert not any(event.get("usage") for event in answer.events[:-1])
        assert [event["choices"] for event in answer.events[:2]] == [event["choices"] for event in said[:2]]
        assert answer.events[-1] == "[DONE]"
    for kind, count in (("prompt", 4), ("completion", 6)):
        assert await front.metric("backhaul_router_tokens_total", kind=kind) == count


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_usage_of_a_response_is_that_of_its_last_event(front: Front, d: StubEngine, status: str) -> None:
    endpoint = ENDPOINTS["responses"]
    counts = {"input_tokens": 4, "output_tokens": 6, "total_tokens": 10, "input_tokens_details": {"cached_tokens": 1}}
    said = [
        {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
        {"type": "response.in_progress", "response": {"status": "in_progress", "usage": dict.fromkeys(counts, 0)}},
        {"type": f"response.{status}", "response": {"status": status, "output": [], "usage": counts}},
    ]
    stream = endpoint.pieces(said)
    d.scripts.append(streams(d, stream))
    answer = await front.post(endpoint.body(stream=True), path=endpoint.path)
    assert answer.raw == b"".join(stream)
    for kind, count in (("prompt", 4), ("completion", 6)):
        assert await front.metric("backhaul_router_tokens_total", kind=kind) == count


@every_endpoint
@streamed_and_whole
async def test_tokens_of_every_endpoint_are_counted(front: Front, endpoint: Endpoint, stream: bool) -> None:
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path)
    assert endpoint.said(answer, stream=stream)
    if stream and endpoint.name != "responses":
        assert all("usage" not in event and event["choices"] for event in answer.events[:-1])
    prompt = endpoint.plain.get("token_ids", PROMPT_IDS)
    assert await front.metric("backhaul_router_tokens_total", kind="prompt") == len(prompt)
    assert await front.metric("backhaul_router_tokens_total", kind="completion") == len(OUTPUT_IDS)


@every_endpoint
@pytest.mark.parametrize("begun", [False, True], ids=["nothing came", "an answer had begun"])
async def test_answer_that_breaks_off_is_asked_for_once_more(
    front: Front, d: StubEngine, endpoint: Endpoint, begun: bool
) -> None:
    async def breaks_off(request: web.Request, body: Json) -> web.StreamResponse:
        if begun:
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"id"')
        hang_up(request)
        await asyncio.Event().wait()
        raise AssertionError

    assert (await front.post(endpoint.plain, path=endpoint.path)).status == 200  # a connection to use again
    d.scripts.append(breaks_off)
    answer = await front.post(endpoint.plain, path=endpoint.path)
    assert (answer.status, len(d.seen)) == (200, 3), "nothing of it has reached the client"
    d.scripts.extend([breaks_off] * 3)
    answer = await front.post(endpoint.plain, path=endpoint.path)
    assert answer.status in (502, 503)
    assert len(d.scripts) >= 1, "never a second time"

"""Requests that any one engine can answer, and the end of requests by their ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from connectors.wire import sse
from router import memory
from tests.router_harness import CHAT, Front, router_over, until
from tests.stub_engine import TEXT, Script, StubEngine, hang_up

RENDER = "/v1/chat/completions/render"


def tells(body: Any, status: int = 200) -> Script:
    async def script(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return script


async def test_a_post_goes_to_one_engine_without_engine_talk(front: Front, p: StubEngine, d: StubEngine) -> None:
    p.scripts.append(tells({"token_ids": [1, 2], "sampling_params": {}}))
    answer = await front.post({**CHAT, "kv_transfer_params": {"do_remote_prefill": True}}, path=RENDER)
    assert answer.json == {"token_ids": [1, 2], "sampling_params": {}}
    assert [seen.body for seen in p.seen] == [CHAT]
    assert not d.seen


async def test_tokenizing_is_passed_on_and_known_ids_are_not(front: Front, p: StubEngine) -> None:
    p.tokenizes = True
    answer = await front.post({"model": "m", "prompt": "Hi", "known_token_ids": [1]}, path="/tokenize")
    assert answer.status == 200
    assert "tokens" in answer.json
    assert p.tokenized == [{"model": "m", "prompt": "Hi"}]


async def test_another_engine_answers_when_one_cannot(front: Front, p: StubEngine, d: StubEngine) -> None:
    async def breaks_off(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        hang_up(request)
        return web.Response()

    p.scripts.append(breaks_off)
    d.scripts.append(tells({"from": "d"}))
    assert (await front.post(CHAT, path=RENDER)).json == {"from": "d"}


async def test_the_only_engine_is_asked_again_when_it_breaks_off(p: StubEngine, redis_url: str) -> None:
    async def breaks_off(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        hang_up(request)
        return web.Response()

    async with router_over([], [p], redis_url) as front:
        p.scripts += [breaks_off, tells({"at": "last"})]
        assert (await front.post(CHAT, path=RENDER)).json == {"at": "last"}
        p.scripts += [breaks_off, breaks_off]
        assert (await front.post(CHAT, path=RENDER)).status == 502


async def test_a_refusal_is_the_engines_own(front: Front, p: StubEngine, d: StubEngine) -> None:
    p.scripts.append(tells({"error": {"message": "no", "type": "T", "param": "q", "code": "c"}}, 422))
    answer = await front.post(CHAT, path=RENDER)
    assert (answer.status, answer.error["message"], answer.error["param"]) == (422, "no", "q")
    assert not d.seen


@pytest.mark.parametrize(("body", "status"), [({"model": "unknown"}, 404), ({"model": 5}, 400), ([], 400)])
async def test_what_cannot_be_passed_on(front: Front, body: object, status: int) -> None:
    assert (await front.post(body, path="/tokenize")).status == status


async def test_a_get_below_v1_is_answered_by_an_engine(front: Front) -> None:
    assert (await front.get("/v1/responses/resp_1?a=1")).json == {"id": "resp_1", "on": "decode"}
    assert (await front.get("/v1/chat/completions")).status == 405
    assert (await front.get("/server_info")).status == 404
    assert (await front.get("/ping")).status == 200


async def test_an_abort_ends_the_turn_of_its_client_only(front: Front, p: StubEngine, d: StubEngine) -> None:
    """These engines have no route for it, so the router itself ends the turn, in whatever phase."""
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer me"}
    for engine in (p, d):
        engine.awake.clear()
        turn = asyncio.create_task(front.post(CHAT, headers=headers))
        await until(lambda engine=engine: engine.seen, "the engine has the request")  # type: ignore[misc]
        for names, who, count in (
            (["other"], headers, 0),
            (["mine"], {"Authorization": "Bearer you"}, 0),
            (["chatcmpl-mine", "mine"], headers, 1),
        ):
            told = await front.post({"request_ids": names}, path="/inference/v1/abort_requests", headers=who)
            assert told.json == {"aborted": count}
        answer = await turn
        assert (answer.status, answer.error["code"]) == (409, "aborted")
        await until(lambda engine=engine: engine.aborted, "the engine saw its connection closed")  # type: ignore[misc]
        engine.awake.set()
        engine.seen.clear()
    await until(lambda: p.released, "what P held is given back")


async def test_an_abort_in_mid_stream_is_an_error_event(front: Front, d: StubEngine) -> None:
    begun = asyncio.Event()

    async def stalls(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await d.play(request, d.events(body)[:2])
        begun.set()
        await asyncio.Event().wait()
        return response

    d.scripts.append(stalls)
    turn = asyncio.create_task(front.post({**CHAT, "stream": True}, headers={"X-Request-Id": "mine"}))
    await begun.wait()
    await front.post({"request_ids": ["mine"]}, path="/inference/v1/abort_requests")
    answer = await turn
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == "aborted"
    await until(lambda: d.aborted, "the engine saw its connection closed")


async def test_an_abort_asked_for_several_times_is_told_once(front: Front, p: StubEngine) -> None:
    p.awake.clear()
    turn = asyncio.create_task(front.post(CHAT, headers={"X-Request-Id": "mine"}))
    await until(lambda: p.seen, "the engine has the request")
    await asyncio.gather(
        *(front.post({"request_ids": ["mine"]}, path="/inference/v1/abort_requests") for _ in range(8))
    )
    answer = await turn
    assert (answer.status, answer.error["code"]) == (409, "aborted")
    p.awake.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_that_comes_too_late_changes_nothing(
    front: Front, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    filing, filed, remember = asyncio.Event(), asyncio.Event(), memory.remember

    async def slow(*given: Any) -> None:
        filing.set()
        await filed.wait()
        await remember(*given)

    monkeypatch.setattr(memory, "remember", slow)
    turn = asyncio.create_task(front.post({**CHAT, "stream": stream}, headers={"X-Request-Id": "mine"}))
    await filing.wait()
    told = await front.post({"request_ids": ["mine"]}, path="/inference/v1/abort_requests")
    assert told.json == {"aborted": 0}
    filed.set()
    answer = await turn
    assert answer.status == 200
    assert (answer.text if stream else answer.text_of_whole) == TEXT
    assert not stream or answer.events[-1] == "[DONE]"


@pytest.mark.parametrize("ids", [None, "mine", [1], ["x"] * 9000])
async def test_a_list_of_ids_is_expected(front: Front, ids: object) -> None:
    answer = await front.post({"request_ids": ids}, path="/inference/v1/abort_requests")
    assert (answer.status, answer.error["param"]) == (400, "request_ids")


async def test_an_abort_of_several_answers_ends_them_at_the_engine(front: Front, d: StubEngine) -> None:
    """Which counts each of them; the stream then comes to its end by itself."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse.event({"choices": [{"index": 0, "delta": {"content": "a"}}]}))
        begun.set()
        await ended.wait()
        await response.write(sse.event({"choices": [{"index": 0, "finish_reason": "abort"}]}) + sse.DONE_EVENT)
        return response

    async def aborts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        ended.set()
        return web.json_response({"aborted": 2})

    d.scripts += [waits, aborts]
    turn = asyncio.create_task(front.post({**CHAT, "stream": True, "n": 2}, headers={"X-Request-Id": "mine"}))
    await begun.wait()
    await front.post({"request_ids": ["mine"]}, path="/inference/v1/abort_requests")
    answer = await turn
    assert answer.events[-1] == "[DONE]"
    assert answer.events[-2]["choices"][0]["finish_reason"] == "abort"
    assert not d.aborted

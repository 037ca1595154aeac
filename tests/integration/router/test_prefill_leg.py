"""The prefill leg: one token, nothing an engine would refuse, and no fault of it hidden."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from connectors.wire import sse
from tests.endpoints import ENDPOINTS, Endpoint, every_endpoint, streamed_and_whole
from tests.router_harness import NOBODY, Front, pretend_ready, router_over, until
from tests.stub_engine import Script, StubEngine, refuse

STRICT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def strict(engine: StubEngine) -> Script:
    """Answers 400 to what does not go together, as engines do."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        sampling = {**body, **body.get("sampling_params", {})}
        limit = min(sampling[name] for name in STRICT_LIMITS if sampling.get(name) is not None)
        wrong = None
        if not body.get("stream") and body.get("stream_options") is not None:
            wrong = "stream options only when stream=True"
        elif (sampling.get("min_tokens") or 0) > limit:
            wrong = "min_tokens is larger than max_tokens"
        elif (sampling.get("best_of") or sampling.get("n") or 1) < (sampling.get("n") or 1):
            wrong = "best_of is smaller than n"
        elif body.get("stream"):
            return await engine.play(request, engine.events(body))
        return await refuse(400, wrong)(request, body) if wrong else web.json_response(engine.whole(body))

    return script


ASKED: dict[str, list[dict[str, Any]]] = {
    "chat": [{"max_tokens": 500}, {"max_completion_tokens": 500}, {"max_tokens": 9, "max_completion_tokens": 500}, {}],
    "completions": [{"max_tokens": 500}, {"max_tokens": None}, {}],
    "responses": [{"max_output_tokens": 500}, {}],
    "generate": [{"max_tokens": 500}, {}],
}


@every_endpoint
@streamed_and_whole
@pytest.mark.parametrize("with_minimum", [False, True], ids=["", "min_tokens"])
async def test_it_makes_one_token_whatever_the_client_asked_for(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, stream: bool, with_minimum: bool
) -> None:
    for asked in ASKED[endpoint.name]:
        p.seen.clear()
        d.seen.clear()
        sampling = {**asked, **({"min_tokens": 5} if with_minimum else {})}
        body = endpoint.limited(**sampling)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        p.scripts.append(strict(p))
        assert endpoint.said(await front.post(body, path=endpoint.path), stream=stream)
        [to_p], [to_d] = p.bodies, d.bodies
        limits = {name: endpoint.sampling(to_p)[name] for name in STRICT_LIMITS if name in endpoint.sampling(to_p)}
        assert set(limits.values()) == {1}
        assert set(asked) <= set(limits)
        assert to_p["stream"] is False
        assert {"stream_options", "min_tokens"}.isdisjoint({*to_p, *endpoint.sampling(to_p)})
        told = endpoint.sampling(to_d)
        assert {key: told[key] for key in sampling} == sampling
        assert [told[name] for name in STRICT_LIMITS if name in told and name not in asked] == []
        assert to_d.get("stream", False) is stream


@every_endpoint
@streamed_and_whole
async def test_event_stream_in_its_place_is_502(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def streams(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await p.play(request, [*p.events(body), sse.DONE_EVENT])

    p.scripts.append(streams)
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path)
    assert answer.status == 502
    assert "text/event-stream where JSON was due" in answer.error["message"]
    assert not d.seen
    assert [record for record in caplog.records if record.exc_info] == []


@every_endpoint
@streamed_and_whole
@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True}], ids=["none", "no blocks"])
async def test_handoff_that_does_not_come_is_counted_and_told(
    front: Front,
    p: StubEngine,
    endpoint: Endpoint,
    stream: bool,
    params: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def forgets(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({**p.whole(body), "kv_transfer_params": params})

    p.scripts.append(forgets)
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path)
    assert endpoint.said(answer, stream=stream)
    assert [record.levelname for record in caplog.records if "transfer params" in record.message] == ["WARNING"]
    for each in ENDPOINTS:
        missing = await front.metric("backhaul_router_kv_handoff_missing_total", endpoint=each)
        assert missing == (1 if each == endpoint.name else 0)


@every_endpoint
@streamed_and_whole
async def test_its_refusal_reaches_the_client_and_decode_is_not_asked(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, stream: bool
) -> None:
    p.scripts.append(refuse(400, "this model takes no images"))
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path)
    assert answer.status == 400
    assert answer.error == {"message": "this model takes no images", "type": "TestError", "param": "p", "code": 400}
    assert len(p.seen) == 1
    assert not d.seen


@every_endpoint
@pytest.mark.parametrize("fault", ["500", "unreachable"])
async def test_its_fault_is_met_by_another_engine(
    redis_url: str, p: StubEngine, d: StubEngine, endpoint: Endpoint, fault: str
) -> None:
    async with (
        StubEngine("prefill").running() as second,
        router_over([p if fault == "500" else NOBODY, second], [d], redis_url, probe_interval=60) as front,
    ):
        first = front.router.pool.get("prefill", p.url if fault == "500" else NOBODY)
        pretend_ready(first, front.router.pool.get("prefill", second.url))
        front.router.pool.get("prefill", second.url).last += 5  # so that the first is chosen
        p.scripts.append(refuse(500))
        answer = await front.post(endpoint.plain, path=endpoint.path)
        assert endpoint.said(answer, stream=False)
        assert len(second.seen) == 1
        assert await front.metric("backhaul_router_retries_total", leg="prefill") == 1
        assert await front.metric("backhaul_router_leg_failures_total", leg="prefill") == 1


@every_endpoint
async def test_with_nobody_to_do_it_decode_may_if_it_is_so_set(
    redis_url: str, d: StubEngine, endpoint: Endpoint
) -> None:
    async with router_over([NOBODY], [d], redis_url) as front:
        await until(lambda: front.router.pool.get("prefill", NOBODY).state == "ejected", "it is known to be down")
        answer = await front.post(endpoint.plain, path=endpoint.path)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert not d.seen
    async with router_over([NOBODY], [d], redis_url, prefill_fallback="decode") as front:
        assert endpoint.said(await front.post(endpoint.plain, path=endpoint.path), stream=False)
        assert "remote_block_ids" not in (d.bodies[0].get("kv_transfer_params") or {})

"""/inference/v1/abort_requests: requests ended by the ids their clients know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from connectors.transport import LeaseReleased
from connectors.wire.note import LEG_HEADER
from connectors.wire.seal import SEAL_HEADER, SealKeys
from connectors.wire.transfer import ECTransferParams, KVTransferParams
from engine.messages import Output, Stop
from engine.request import Request
from tests.unit.server.double import Stage, byte_ids, eventually

ABORT = "/inference/v1/abort_requests"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    GENERATE: {"token_ids": byte_ids("hi")},
}
HEADERS = {"X-Request-Id": "mine"}


def unfinished(request: Request) -> Iterable[Output]:
    yield Output(request.request_id, byte_ids("a"))


async def running(stage: Stage, path: str, num_requests: int = 1, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    """A request that the engine has begun."""
    stage.script = unfinished
    before = len(stage.submitted)
    task = asyncio.create_task(stage.post(path, BODIES[path] | fields, headers=HEADERS))
    await eventually(lambda: len(stage.submitted) == before + num_requests)
    return task


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "mine"),
        (CHAT, "chatcmpl-mine"),
        (COMPLETIONS, "mine"),
        (COMPLETIONS, "cmpl-mine"),
        (COMPLETIONS, "cmpl-mine-0"),
        (GENERATE, "mine"),
        (GENERATE, "generate-tokens-mine"),
    ],
)
async def test_aborted_request_ends_with_an_answer(stage: Stage, path: str, name: str) -> None:
    task = await running(stage, path)
    assert await stage.post(ABORT, {"request_ids": ["unknown", name]}) == (200, {"aborted": 1})
    status, answer = await task
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == 1
    assert stage.stops == [Stop(stage.submitted[0].request_id, aborted=True)]
    assert stage.client.num_open == 0


async def test_engine_id_is_a_name_too(stage: Stage) -> None:
    task = await running(stage, GENERATE)
    assert (await stage.post(ABORT, {"request_ids": [stage.submitted[0].request_id]}))[1] == {"aborted": 1}
    assert (await task)[1]["choices"][0]["finish_reason"] == "abort"


async def test_the_routers_name_tells_apart_what_clients_call_the_same(stage: Stage) -> None:
    stage.script = unfinished
    tasks = [
        asyncio.create_task(stage.post(CHAT, BODIES[CHAT], headers=HEADERS | {LEG_HEADER: leg})) for leg in ("a", "b")
    ]
    await eventually(lambda: len(stage.submitted) == 2)
    assert (await stage.post(ABORT, {"request_ids": ["a"]}))[1] == {"aborted": 1}
    assert (await tasks[0])[1]["choices"][0]["finish_reason"] == "abort"
    assert not tasks[1].done()
    assert (await stage.post(ABORT, {"request_ids": ["b"]}))[1] == {"aborted": 1}
    await tasks[1]


async def test_id_of_the_body_is_a_name_too(stage: Stage) -> None:
    stage.script = unfinished
    task = asyncio.create_task(stage.post(GENERATE, BODIES[GENERATE] | {"request_id": "theirs"}))
    await eventually(lambda: len(stage.submitted) == 1)
    assert (await stage.post(ABORT, {"request_ids": ["theirs"]}))[1] == {"aborted": 1}
    assert (await task)[1]["request_id"] == "theirs"


@pytest.mark.parametrize("path", list(BODIES))
async def test_stream_of_an_aborted_request_ends_whole(stage: Stage, path: str) -> None:
    stage.script = unfinished
    task = asyncio.create_task(stage.stream(path, BODIES[path] | {"request_id": "mine"}))
    await eventually(lambda: len(stage.submitted) == 1)
    assert (await stage.post(ABORT, {"request_ids": ["mine"]}))[1] == {"aborted": 1}
    events = await task
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert all("error" not in event for event in events)


async def test_all_choices_of_a_call_end_whether_begun_or_not(stage: Stage) -> None:
    """The second waits for the first's prompt to be in the cache."""
    stage.script = lambda request: []
    body = BODIES[COMPLETIONS] | {"n": 2}
    task = asyncio.create_task(stage.post(COMPLETIONS, body, headers=HEADERS))
    await eventually(lambda: len(stage.submitted) == 1)
    assert (await stage.post(ABORT, {"request_ids": ["mine"]}))[1] == {"aborted": 2}
    status, answer = await task
    assert status == 200
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
    assert len(stage.submitted) == 1


async def test_others_go_on(stage: Stage) -> None:
    task = await running(stage, GENERATE)
    for name in ("min", "mine-", "generate-tokens", ""):
        assert (await stage.post(ABORT, {"request_ids": [name]}))[1] == {"aborted": 0}
    assert stage.stops == []
    task.cancel()


async def test_requests_that_have_ended_are_passed_over(stage: Stage) -> None:
    assert (await stage.post(GENERATE, BODIES[GENERATE], headers=HEADERS))[0] == 200
    assert await stage.post(ABORT, {"request_ids": ["mine"]}) == (200, {"aborted": 0})


async def test_params_of_an_aborted_request_are_not_told_but_given_back(prefill: Stage) -> None:
    params = KVTransferParams(do_remote_prefill=True, remote_request_id="held", remote_block_ids=[[1]])
    ec = ECTransferParams.parse({"picture": {}})
    prefill.script = lambda request: [
        Output(request.request_id, byte_ids("a"), kv_transfer_params=params, ec_transfer_params=ec)
    ]
    body = BODIES[CHAT] | {"kv_transfer_params": {"do_remote_decode": True}}
    task = asyncio.create_task(prefill.post(CHAT, body, headers=HEADERS))
    await eventually(lambda: len(prefill.submitted) == 1)
    assert (await prefill.post(ABORT, {"request_ids": ["mine"]}))[1] == {"aborted": 1}
    assert {"kv_transfer_params", "ec_transfer_params"}.isdisjoint((await task)[1])
    await eventually(lambda: prefill.other == [LeaseReleased("held")])


async def test_shutdown_is_still_an_error(stage: Stage) -> None:
    stage.script = lambda request: [Output(request.request_id, [], "abort")]
    assert (await stage.post(GENERATE, BODIES[GENERATE]))[0] == 503


@pytest.mark.parametrize(
    "body", [{}, {"request_ids": None}, {"request_ids": "mine"}, {"request_ids": [1]}, {"request_ids": ["a"] * 8193}]
)
async def test_bad_bodies_are_refused(stage: Stage, body: dict[str, Any]) -> None:
    status, answer = await stage.post(ABORT, body)
    assert status == 400
    assert answer["error"]["param"].startswith("request_ids")


async def test_only_holders_of_the_key_abort(tiny_model: Path) -> None:
    keys, others = SealKeys((b"0123456789abcdef",)), SealKeys((b"fedcba9876543210",))
    async with Stage(tiny_model, seals=keys) as stage:
        task = await running(stage, GENERATE)
        body = {"request_ids": ["mine"]}
        for seal in (None, others.seal(ABORT, {}), keys.seal(GENERATE, {})):
            headers = {} if seal is None else {SEAL_HEADER: seal}
            status, answer = await stage.post(ABORT, body, headers=headers)
            assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")
        assert not task.done()
        assert await stage.post(ABORT, body, headers={SEAL_HEADER: keys.seal(ABORT, {})}) == (200, {"aborted": 1})
        await task


async def test_scale_out_routes_can_be_switched_off(tiny_model: Path) -> None:
    paths = (
        GENERATE,
        ABORT,
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/responses/render",
        "/v1/chat/completions/derender",
        "/v1/completions/derender",
    )
    async with Stage(tiny_model, enable_scale_out=False) as stage:
        for path in paths:
            status, answer = await stage.post(path, data=b"{ not read")
            assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")
            assert "--enable-scale-out" in answer["error"]["message"]
        assert (await stage.post(COMPLETIONS, {"prompt": "hi"}))[0] == 200
    async with Stage(tiny_model) as stage:
        for path in paths:
            assert (await stage.post(path, data=b"{ not read"))[0] == 400

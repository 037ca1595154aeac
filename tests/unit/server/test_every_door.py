"""Transfer params pass every endpoint that generates in the same way: in, to the scheduler, and out again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientConnectionResetError, web

from connectors.transport import LeaseReleased, Peer
from connectors.wire.seal import SEAL_HEADER, SealKeys
from connectors.wire.transfer import ECTransferParams, KVTransferParams
from engine.api import generation
from engine.api.generation import json_response
from engine.messages import Output
from engine.request import Request
from tests.unit.server.double import Stage, byte_ids, eventually, params_for_decode

KV, EC = "kv_transfer_params", "ec_transfer_params"
SENT: dict[str, dict[str, Any]] = {
    KV: params_for_decode(),
    EC: {"picture": {"peer_host": "10.0.0.3", "peer_port": 7000, "size_bytes": 64, "shape": [4, 8], "new": 1}},
}
RETURNED: dict[str, dict[str, Any]] = {
    KV: params_for_decode(remote_request_id="next", unknown={"to": "us"}),
    EC: {"drawing": {"transfer_id": "t", "metadata": {"grid": [1, 2]}}},
}
KEYS = SealKeys((b"0123456789abcdef",))
OWNER = (Peer("the-prefill-engine", "10.0.0.1", 8100), "chatcmpl-p")
MISSING = "missing"


@dataclass(frozen=True)
class Door:
    """An endpoint, a body that it takes, and where that has its extra arguments."""

    path: str
    body: dict[str, Any]
    extra: tuple[str, ...] = ("vllm_xargs",)

    def with_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        value: Any = extra
        for key in reversed(self.extra):
            value = {key: value}
        return self.body | value


DOORS = (
    Door("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    Door("/v1/completions", {"prompt": "hi"}),
    Door("/inference/v1/generate", {"token_ids": byte_ids("hi")}, extra=("sampling_params", "extra_args")),
    Door("/v1/responses", {"input": "hi"}),
)
every_door = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each_kind = pytest.mark.parametrize("name", [KV, EC])


async def events_of(stage: Stage, door: Door, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
    """The answer, or the events of the stream, as the objects in which params would stand."""
    async with stage.session.post(door.path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        text = await response.read()
    if not body.get("stream"):
        return [orjson.loads(text)]
    lines = [line.removeprefix(b"data: ") for line in text.split(b"\n") if line.startswith(b"data: ")]
    events = [orjson.loads(line) for line in lines if line != b"[DONE]"]
    return [event.get("response", event) for event in events]


def taken(request: Request, name: str) -> KVTransferParams | ECTransferParams | None:
    return request.kv_transfer_params if name == KV else request.ec_transfer_params


def parsed(name: str, value: dict[str, Any]) -> KVTransferParams | ECTransferParams:
    return KVTransferParams.parse(value) if name == KV else ECTransferParams.parse(value)


def returning(*names: str, early: bool) -> Callable[[Request], Iterable[Output]]:
    """Says "ab"; the connector returns params with the first token or with the last."""

    def script(request: Request) -> Iterable[Output]:
        kv = KVTransferParams.parse(RETURNED[KV]) if KV in names else None
        ec = ECTransferParams.parse(RETURNED[EC]) if EC in names else None
        told = {"kv_transfer_params": kv, "ec_transfer_params": ec}
        first, last = (told, {}) if early else ({}, told)
        yield Output(request.request_id, byte_ids("a"), **first)
        yield Output(request.request_id, byte_ids("b"), "length", **last)

    return script


@every_door
@streamed
@each_kind
@pytest.mark.parametrize("said", ["params", {}, None, MISSING], ids=str)
async def test_what_was_sent_reaches_the_scheduler(
    decode: Stage, door: Door, stream: bool, name: str, said: Any
) -> None:
    value = SENT[name] if said == "params" else said
    body = door.body | {"stream": stream} | ({} if value == MISSING else {name: value})
    await events_of(decode, door, body)
    (request,) = decode.submitted
    expected = parsed(name, value) if isinstance(value, dict) else None
    assert taken(request, name) == expected
    assert (name in request.sampling.extra_args) is (expected is not None)
    assert taken(request, EC if name == KV else KV) is None
    assert decode.transport.released == []


@every_door
@streamed
@pytest.mark.parametrize("early", [False, True], ids=["with the last token", "with an earlier one"])
@pytest.mark.parametrize("names", [(KV,), (EC,), (KV, EC)], ids=" ".join)
async def test_what_the_connector_returned_is_told_at_the_end(
    decode: Stage, door: Door, stream: bool, early: bool, names: tuple[str, ...]
) -> None:
    decode.script = returning(*names, early=early)
    events = await events_of(decode, door, door.body | {"stream": stream})
    for name in (KV, EC):
        told = [event[name] for event in events if name in event]
        assert told == ([RETURNED[name]] if name in names else [])
    assert all(name in events[-1] for name in names)


@every_door
@streamed
async def test_both_at_once_and_what_is_beside_them_survive(decode: Stage, door: Door, stream: bool) -> None:
    body = door.with_extra({"mine": [1, {"a": None}]}) | SENT | {"stream": stream}
    await events_of(decode, door, body)
    extra = decode.submitted[0].sampling.extra_args
    assert extra == {"mine": [1, {"a": None}], KV: parsed(KV, SENT[KV]), EC: parsed(EC, SENT[EC])}


@every_door
async def test_those_among_the_extra_arguments_count_where_nobody_needs_a_key(decode: Stage, door: Door) -> None:
    await events_of(decode, door, door.with_extra(SENT | {"mine": 1}))
    await events_of(decode, door, door.with_extra(SENT) | {EC: {}})
    first, second = decode.submitted
    assert first.sampling.extra_args == {KV: parsed(KV, SENT[KV]), EC: parsed(EC, SENT[EC]), "mine": 1}
    assert second.ec_transfer_params == ECTransferParams()  # the top wins
    assert second.kv_transfer_params == parsed(KV, SENT[KV])


@every_door
@each_kind
@pytest.mark.parametrize("where", ["top", "extra"])
async def test_engine_with_a_key_refuses_what_is_not_sealed(
    tiny_model: Path, door: Door, name: str, where: str
) -> None:
    unsealed = {name: SENT[name]}
    body = door.body | unsealed if where == "top" else door.with_extra(unsealed)
    async with Stage(tiny_model, role="decode", kv=True, seals=KEYS) as stage:
        for headers in ({}, {SEAL_HEADER: KEYS.seal(door.path, {name: {}})}):
            status, answer = await stage.post(door.path, body, headers=headers)
            assert (status, answer["error"]["type"], answer["error"]["param"]) == (403, "PermissionDeniedError", name)
        assert stage.submitted == []
        assert stage.transport.released == []  # not on the word of someone unknown


@every_door
@streamed
async def test_engine_with_a_key_takes_what_is_sealed(tiny_model: Path, door: Door, stream: bool) -> None:
    async with Stage(tiny_model, role="decode", kv=True, seals=KEYS) as stage:
        stage.script = returning(KV, early=True)
        body = door.with_extra({"mine": 1}) | SENT | {"stream": stream}
        events = await events_of(stage, door, body, {SEAL_HEADER: KEYS.seal(door.path, body)})
        assert events[-1][KV] == RETURNED[KV]
        (request,) = stage.submitted
        assert request.sampling.extra_args == {KV: parsed(KV, SENT[KV]), EC: parsed(EC, SENT[EC]), "mine": 1}


@every_door
async def test_blocks_of_a_sealed_request_that_is_refused_are_released(tiny_model: Path, door: Door) -> None:
    async with Stage(tiny_model, role="decode", kv=True, seals=KEYS) as stage:
        body = dict.fromkeys(door.body, 3.5) | {KV: SENT[KV]}
        status, _ = await stage.post(door.path, body, headers={SEAL_HEADER: KEYS.seal(door.path, body)})
        assert status == 400
        await eventually(lambda: stage.transport.released == [OWNER])


@every_door
async def test_blocks_are_released_when_the_extra_arguments_are_none(decode: Stage, door: Door) -> None:
    *holders, name = door.extra if len(door.extra) > 1 else ("", *door.extra)
    extra: dict[str, Any] = {name: 5} if not any(holders) else {holders[0]: {name: 5}}
    status, answer = await decode.post(door.path, door.body | extra | {KV: SENT[KV]})
    assert (status, answer["error"]["param"]) == (400, name)
    await eventually(lambda: decode.transport.released == [OWNER])


@every_door
async def test_blocks_that_nobody_hears_of_are_given_back(
    decode: Stage, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is gone when the last event is to be written."""
    decode.script = returning(KV, early=False)
    write = web.StreamResponse.write

    async def gone(response: web.StreamResponse, data: bytes) -> None:
        if b"transfer_params" in data:
            raise ClientConnectionResetError
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", gone)
    async with decode.session.post(
        door.path, json=door.body | {"stream": True, KV: {"offer_blocks": True}}
    ) as response:
        await response.read()
    await eventually(lambda: decode.other == [LeaseReleased("next")])


@every_door
async def test_long_answer_is_written_in_a_thread(decode: Stage, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def written(value: Any, **options: Any) -> web.Response:
        names.append(threading.current_thread().name)
        return json_response(value, **options)

    monkeypatch.setattr(generation, "json_response", written)
    for least in (1, 1000):
        monkeypatch.setattr(generation, "LONG_ANSWER", least)
        await events_of(decode, door, door.body)
    in_thread, at_once = (name.startswith("large-bodies") for name in names)
    assert (in_thread, at_once) == (True, False)

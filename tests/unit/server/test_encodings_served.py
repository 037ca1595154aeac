"""/ec/…: what engines ask of each other about encodings; where that is asked; what a worker that leaves waits for."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from aiohttp import web

from connectors.ec import EncoderConnector, EncoderLayout
from connectors.lease import Leases
from connectors.transport import LeaseReleased, Peer
from engine import address, sizing
from engine.address import side_channel
from engine.api.context import ECSide
from engine.config import EngineConfig
from engine.drain import drain_when_told
from engine.errors import StartError
from engine.media.cache import EncoderCacheManager
from engine.messages import EncoderTransfer
from engine.server import HTTPServer, bind
from engine.sizing import choose_encoder_blocks
from tests.unit.server.double import RecordingTransport, Stage, eventually

ENGINE_ID = "the-encoder"
NAMES = {"engine_id": ENGINE_ID, "request_id": "r/0"}


@dataclasses.dataclass
class Encoder:
    stage: Stage
    leases: Leases


@pytest.fixture
async def encoder(tiny_model: Path) -> AsyncIterator[Encoder]:
    async with Stage(tiny_model, kv=True) as stage:
        leases = Leases(claim_seconds=10)
        connector = EncoderConnector(
            transport=RecordingTransport(),
            leases=leases,
            cache=EncoderCacheManager(4, 2),
            layout=EncoderLayout("encodings", 2, 8, 32),
            me=Peer(ENGINE_ID, "127.0.0.1", 1),
            produces=True,
            consumes=False,
            lease_seconds=30,
        )
        stage.serving = dataclasses.replace(stage.serving, ec=ECSide(ENGINE_ID, connector))
        stage.worker.serving = stage.serving
        yield Encoder(stage, leases)


async def test_an_announcement_is_claimed_renewed_and_given_back(encoder: Encoder) -> None:
    stage, leases = encoder.stage, encoder.leases
    async with stage.session.get("/ec/agent") as response:
        assert response.status == 200
    leases.hold("r/0", [3, 1], ["aa", "bb"], 30, revocable=True)
    status, claim = await stage.post("/ec/claim", NAMES | {"reader": "p"})
    assert (status, claim["block_ids"], claim["block_hashes"]) == (200, [3, 1], ["aa", "bb"])
    status, answer = await stage.post("/ec/claim", NAMES)
    assert (status, answer["error"]["code"]) == (410, "lease_claimed")
    assert await stage.post("/ec/renew", {"engine_id": ENGINE_ID, "request_ids": ["r/0"]}) == (200, {"renewed": 1})
    assert await stage.post("/ec/release", NAMES) == (200, {"released": False}), "somebody reads"
    assert await stage.post("/ec/release", NAMES | {"claim_id": claim["claim_id"]}) == (200, {"released": True})
    await eventually(lambda: bool(stage.other))
    assert stage.other == [EncoderTransfer(LeaseReleased("r/0"))]


async def test_leases_of_kv_and_of_encodings_have_nothing_to_do_with_each_other(encoder: Encoder) -> None:
    encoder.leases.hold("r/0", [1], ["aa"], 30, revocable=True)
    assert (await encoder.stage.post("/kv/claim", NAMES | {"engine_id": "the-engine"}))[0] == 410
    assert (await encoder.stage.post("/ec/claim", NAMES))[0] == 200
    for path in ("claim", "release", "renew"):
        status, answer = await encoder.stage.post(f"/ec/{path}", NAMES | {"engine_id": "other", "request_ids": []})
        assert (status, answer["error"]["code"]) == (409, "engine_mismatch")


async def test_an_engine_without_encodings_says_so(stage: Stage) -> None:
    assert (await stage.session.get("/ec/agent")).status == 404
    status, answer = await stage.post("/ec/claim", NAMES)
    assert (status, "encoder-cache connector" in answer["error"]["message"]) == (404, True)


async def test_an_engine_whose_encodings_cannot_be_reached_takes_no_requests(encoder: Encoder) -> None:
    assert encoder.stage.serving.ec is not None
    encoder.stage.serving.ec.transport.failed = True  # type: ignore[misc]
    assert (await encoder.stage.session.get("/health")).status == 503


@pytest.mark.parametrize("end", ["read", "run out"])
async def test_what_was_announced_is_waited_for(encoder: Encoder, end: str) -> None:
    stage = encoder.stage
    encoder.leases.hold("r/0", [1], ["aa"], 30, revocable=True)
    stage.worker.leaving.set()
    task = asyncio.create_task(drain_when_told(stage.worker, stage.serving))
    done, _ = await asyncio.wait([task], timeout=0.2)
    assert not done
    if end == "read":
        assert (await stage.post("/ec/claim", NAMES))[0] == 200
        encoder.leases.release("r/0")
    else:
        encoder.leases.expire(time.monotonic() + 31)
    await asyncio.wait_for(task, 5)


# Where peers are told to ask.

EC = {"VLLM_EC_SIDE_CHANNEL_HOST": "ec.test", "VLLM_EC_SIDE_CHANNEL_PORT": "5601"}
NIXL = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "nixl.test", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}


@pytest.mark.parametrize(
    ("settings", "environ", "where"),
    [
        ({}, {}, ("api.test", 8100)),
        ({}, NIXL, ("nixl.test", 5600)),
        ({}, NIXL | EC, ("ec.test", 5601)),
        ({"ec_ip": "10.0.0.7"}, NIXL | EC, ("10.0.0.7", 5601)),
        ({"ec_ip": "10.0.0.7", "ec_port": 7000}, EC, ("10.0.0.7", 7000)),
    ],
)
def test_side_channel_is_as_configured_or_as_vllm_names_it(
    settings: dict[str, object], environ: dict[str, str], where: tuple[str, int]
) -> None:
    config = EngineConfig.model_validate({"model": "tiny", "ec_transfer_config": settings})
    assert side_channel(config, "api.test", 8100, environ) == where


@pytest.mark.parametrize("text", ["x", "0", "70000", "-1"])
def test_side_channel_with_a_bad_port_is_refused(text: str) -> None:
    with pytest.raises(StartError, match="VLLM_EC_SIDE_CHANNEL_PORT: a port expected"):
        address.side_channel(EngineConfig(model="tiny"), "h", 1, {"VLLM_EC_SIDE_CHANNEL_PORT": text})


def test_a_server_answers_on_all_its_ports() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="here")

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    socks = [bind("127.0.0.1", 0) for _ in range(2)]
    server = HTTPServer(app, *socks)
    server.start()
    try:
        for sock in socks:
            with urllib.request.urlopen(f"http://127.0.0.1:{port_of(sock)}/", timeout=5) as response:
                assert response.read() == b"here"
    finally:
        server.stop()


def port_of(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


# What an engine is, and the room it takes.


@pytest.mark.parametrize(
    ("settings", "exchanges", "announces", "fetches", "kv"),
    [
        ({}, False, False, True, False),
        ({"role": "encode"}, True, True, False, False),
        ({"role": "prefill"}, True, False, True, True),
        ({"role": "decode"}, True, False, True, True),
        ({"role": "both", "ec_transfer_config": {"ec_role": "ec_both"}}, True, True, True, False),
        ({"role": "both", "ec_transfer_config": {"ec_connector": "ECCPUConnector"}}, True, False, True, False),
        ({"role": "prefill", "ec_transfer_config": {"ec_role": "ec_producer"}}, True, True, False, True),
        ({"role": "encode", "ec_transfer_config": {"ec_role": "ec_consumer"}}, True, True, False, False),
    ],
)
def test_role_says_what_an_engine_does_and_ec_role_what_it_exchanges(
    settings: dict[str, object], exchanges: bool, announces: bool, fetches: bool, kv: bool
) -> None:
    config = EngineConfig.model_validate({"model": "tiny"} | settings)
    assert config.ec_transfer_enabled == exchanges
    assert (config.announces_encodings, config.fetches_encodings) == (announces, fetches)
    assert config.kv_transfer_enabled == kv


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sizing, "free_memory", lambda device: 160_000)
    return 160_000


def blocks(max_model_len: int, **settings: int) -> int:
    config = EngineConfig(model="tiny", **settings)  # type: ignore[arg-type]
    return choose_encoder_blocks(config, 1000, 64, max_model_len, torch.device("cpu"))


def test_encoder_cache_has_room_for_what_two_sequences_can_show(free: int) -> None:
    assert blocks(65) == 2 * 2
    assert blocks(100_000) == free // sizing.ENCODER_SHARE // 1000


def test_encoder_cache_has_the_size_that_is_asked_for(free: int) -> None:
    assert blocks(65, encoder_cache_bytes=7999) == 7
    with pytest.raises(StartError, match="a block has 1000 bytes"):
        blocks(65, encoder_cache_bytes=999)
    with pytest.raises(StartError, match="of memory are free"):
        blocks(65, encoder_cache_bytes=free + 1)

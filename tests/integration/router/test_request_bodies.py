"""Bodies of any size and encoding, both ways."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.endpoints import ENDPOINTS, Endpoint, every_endpoint, streamed_and_whole
from tests.router_harness import CHAT, Answer, Front, router_over
from tests.router_process import listening, started
from tests.stub_engine import Script, StubEngine

LIMIT = 1000
MIB = 1 << 20


def compressed(engine: StubEngine, stream: bool, status: int = 200) -> Script:
    async def script(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = "text/event-stream" if stream else "application/json"
        data = b"".join(engine.events(body)) if stream else json.dumps(engine.whole(body)).encode()
        if status != 200:
            data = json.dumps({"error": {"message": "too long", "type": "T", "param": "p", "code": status}}).encode()
        headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
        return web.Response(status=status, body=gzip.compress(data), headers=headers)

    return script


@every_endpoint
@streamed_and_whole
@pytest.mark.parametrize("accepted", ["gzip, deflate", "identity", None])
async def test_compressed_answers_of_both_legs_are_readable(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, stream: bool, accepted: str | None
) -> None:
    p.scripts.append(compressed(p, False))
    d.scripts.append(compressed(d, stream))
    headers = {} if accepted is None else {"Accept-Encoding": accepted}
    answer = await front.post(endpoint.body(stream=stream), path=endpoint.path, headers=headers)
    assert endpoint.said(answer, stream=stream)
    assert "Content-Encoding" not in answer.headers
    assert answer.headers.get("Content-Length") == (None if stream else str(len(answer.raw)))
    assert d.bodies[0]["kv_transfer_params"]["remote_engine_id"] == "prefill-engine"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_compressed_error_of_an_engine_is_readable(front: Front, p: StubEngine, d: StubEngine, role: str) -> None:
    engine = p if role == "prefill" else d
    engine.scripts.append(compressed(engine, False, 400))
    answer = await front.post(CHAT)
    assert (answer.status, answer.error["message"]) == (400, "too long")
    assert "Content-Encoding" not in answer.headers


async def test_answer_that_cannot_be_decompressed_is_502(front: Front, d: StubEngine) -> None:
    async def garbled(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=b"no gzip", headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})

    d.scripts.extend([garbled] * 2)
    answer = await front.post(CHAT)
    assert answer.status in (502, 503)
    assert answer.error["message"]


@every_endpoint
@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
async def test_compressed_requests_reach_engines_plain(
    front: Front, p: StubEngine, d: StubEngine, endpoint: Endpoint, encoding: str, pack: Any
) -> None:
    answer = await front.post(pack(endpoint.compact()), path=endpoint.path, headers={"Content-Encoding": encoding})
    assert endpoint.said(answer, stream=False)
    for leg in (*p.seen, *d.seen):
        assert "Content-Encoding" not in leg.headers
        assert len(leg.headers.getall("Content-Length")) == 1


@pytest.mark.parametrize(
    "packed",
    [gzip.compress(json.dumps(CHAT).encode())[:-9], gzip.compress(b"{}") + gzip.compress(b"{}"), b"", b"\x1f\x8b"],
    ids=["cut", "two members", "nothing", "only a beginning"],
)
async def test_broken_compression_is_400(front: Front, p: StubEngine, packed: bytes) -> None:
    answer = await front.post(packed, path="/v1/chat/completions", headers={"Content-Encoding": "gzip"})
    assert answer.status == 400
    assert "decompressed" in answer.error["message"]
    assert not p.seen


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
async def test_encodings_we_do_not_know_are_415(front: Front, encoding: str) -> None:
    answer = await front.post(b"x", path="/v1/chat/completions", headers={"Content-Encoding": encoding})
    assert answer.status == 415
    assert encoding in answer.error["message"]


@pytest.fixture
async def narrow(p: StubEngine, d: StubEngine, redis_url: str) -> AsyncIterator[Front]:
    async with router_over([p], [d], redis_url, max_body_bytes=LIMIT) as front:
        yield front


def padded(endpoint: Endpoint, size: int) -> bytes:
    """A request of so many bytes."""
    short = json.dumps(endpoint.body(user="")).encode()
    return json.dumps(endpoint.body(user="x" * (size - len(short)))).encode()


async def post_in_pieces(front: Front, endpoint: Endpoint, body: bytes) -> Answer:
    """Without saying how long it is."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with front.client.post(front.url + endpoint.path, data=pieces()) as answer:
        return Answer(answer.status, answer.headers, await answer.read())


@every_endpoint
async def test_one_byte_above_the_limit_is_413_in_json(narrow: Front, p: StubEngine, endpoint: Endpoint) -> None:
    fits, big = padded(endpoint, LIMIT), padded(endpoint, LIMIT + 1)
    assert (len(fits), len(big)) == (LIMIT, LIMIT + 1)
    assert endpoint.said(await narrow.post(fits, path=endpoint.path), stream=False)
    assert endpoint.said(await post_in_pieces(narrow, endpoint, fits), stream=False)
    seen = len(p.seen)
    packed = await narrow.post(gzip.compress(big), path=endpoint.path, headers={"Content-Encoding": "gzip"})
    for answer in (
        await narrow.post(big, path=endpoint.path),
        await post_in_pieces(narrow, endpoint, big),
        packed,
    ):
        assert answer.status == 413
        assert answer.headers["Content-Type"].startswith("application/json")
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert f"{LIMIT} bytes" in answer.error["message"]
    assert len(p.seen) == seen


def memory(pid: int, what: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == what:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {what}")


async def test_a_body_of_twenty_megabytes_costs_three_times_its_size_at_most(
    p: StubEngine, d: StubEngine, tmp_path: Path
) -> None:
    size = 20 * MIB
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": [picture]}]}).encode()
    async with started(tmp_path, prefill=[p.url], decode=[d.url]) as router:
        await listening(router, tmp_path)
        assert "👋" in await router.stream()
        before = memory(router.process.pid, "VmRSS")
        Path(f"/proc/{router.process.pid}/clear_refs").write_text("5")  # the peak is counted from here
        async with router.client.post(router.url + "/v1/chat/completions", data=BytesIO(body)) as answer:
            assert answer.status == 200
        grown = memory(router.process.pid, "VmHWM") - before
    assert grown < 3 * size + 4 * MIB, "and a little for everything else"
    for leg in (*p.bodies, *d.bodies):
        if leg["messages"] != CHAT["messages"]:
            assert len(leg["messages"][0]["content"][0]["image_url"]["url"]) > size
    assert len(p.bodies) == len(d.bodies) == 2


@streamed_and_whole
async def test_numbers_and_text_of_an_answer_stay_as_they_are(front: Front, d: StubEngine, stream: bool) -> None:
    odd = {"big": 2**63 - 1, "tiny": 1e-300, "text": "\u2028 \x85 👋 \\", "nested": [[], {}, None], "true": True}

    async def tells(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not stream:
            return web.json_response({**d.whole(body), "odd": odd})
        first, *rest = d.events(body)
        return await d.play(request, [b"data: " + json.dumps({**odd, "choices": []}).encode() + b"\n\n", first, *rest])

    d.scripts.append(tells)
    answer = await front.post({**CHAT, "stream": stream})
    told = answer.events[0] if stream else answer.json["odd"]
    assert {key: told[key] for key in odd} == odd


def test_every_endpoint_is_here() -> None:
    from router.app import ENDPOINTS as SERVED

    assert {each.path for each in SERVED} == {each.path for each in ENDPOINTS.values()}

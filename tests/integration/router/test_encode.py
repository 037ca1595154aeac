"""The encode pool: media are encoded elsewhere before the prompt is prefilled, each once, and text passes by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from connectors.wire.seal import SEAL_HEADER
from router.discovery.follow import SETTINGS
from router.discovery.source import Found
from router.request import MAX_MEDIA
from tests.router_harness import CHAT, COMPLETION, NOBODY, Front, router_over, until
from tests.stub_encoder import StubEncoder, content, looking_at, named, picture
from tests.stub_engine import TEXT, Script, StubEngine

NOWHERE = "redis://127.0.0.1:1/0"
"""For turns that nothing is to be remembered of."""

SOUND = {"type": "input_audio", "input_audio": {"data": "c291bmQ=", "format": "wav"}}
FILM = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,ZmlsbQ=="}}


@pytest.fixture
async def e() -> AsyncIterator[StubEncoder]:
    async with StubEncoder().running() as engine:
        yield engine


@asynccontextmanager
async def over(
    e: list[StubEncoder], p: list[StubEngine], d: list[StubEngine], *, redis: str = NOWHERE, **settings: Any
) -> AsyncIterator[Front]:
    async with router_over(p, d, redis, encode=tuple(one.url for one in e), **settings) as front:
        yield front


def given(body: dict[str, Any]) -> set[str]:
    """The identifiers that an engine was told of."""
    return set(body.get("ec_transfer_params") or ())


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, "there"]}]},
        COMPLETION,
        {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {}},
        {"model": "m", "input": "Hi"},
    ],
    ids=["chat", "text parts", "completion", "generate", "response"],
)
async def test_text_never_touches_encoders(e: StubEncoder, p: StubEngine, d: StubEngine, body: dict[str, Any]) -> None:
    path = {"token_ids": "/inference/v1/generate", "input": "/v1/responses"}
    async with over([e], [p], [d]) as front:
        answer = await front.post(body, path=next((path[key] for key in path if key in body), ""))
        assert answer.status == 200
        assert await front.metric("backhaul_router_media_total") == 0
    assert e.seen == []
    assert "ec_transfer_params" not in p.bodies[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_encodings_are_announced_to_prefill_and_to_nobody_else(
    e: StubEncoder, p: StubEngine, d: StubEngine, stream: bool
) -> None:
    body = looking_at(picture("A"), picture("B"), stream=stream, max_tokens=7)
    async with over([e], [p], [d]) as front:
        answer = await front.post(body)
    assert (answer.text if stream else answer.text_of_whole) == TEXT
    assert b"ec_transfer_params" not in answer.raw
    [to_p], [to_d] = p.bodies, d.bodies
    assert given(to_p) == named("A", "B") == set(e.encoded)
    assert "ec_transfer_params" not in to_d
    assert to_p["messages"] == to_d["messages"] == body["messages"]


async def test_request_to_an_encoder_is_media_and_what_prepares_them(
    e: StubEncoder, p: StubEngine, d: StubEngine
) -> None:
    settings = {
        "mm_processor_kwargs": {"size": {"longest_edge": 512}},
        "media_io_kwargs": {"image": {"mode": "RGB"}},
        "priority": 3,
        "session_id": "s",
    }
    body = looking_at(picture("A", uuid="mine"), **settings, temperature=0.5, tools=[], stream=True)
    async with over([e], [p], [d]) as front:
        await front.post(body, headers={"X-Request-Id": "parent", "Authorization": "Bearer key"})
    [seen] = e.seen
    messages = [{"role": "user", "content": [picture("A", uuid="mine")]}]
    assert seen.body == {"model": "m", "messages": messages, "max_tokens": 1, "stream": False, **settings}
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["Authorization"] == "Bearer key"
    parent, number, rest = seen.headers["X-Request-Id"].split(":")
    assert (parent, number, len(rest)) == ("parent", "0", 6)
    legs = {one.headers["X-Backhaul-Leg"] for one in (*e.seen, *p.seen)}
    assert len(legs) == 2
    for leg in (p.bodies[0], d.bodies[0]):
        assert {key: leg[key] for key in settings} == settings
    assert given(p.bodies[0]) == named("A", mm_processor_kwargs=settings["mm_processor_kwargs"])


async def test_media_of_all_messages_are_encoded_each_once(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [picture("A"), {"type": "text", "text": "and"}, picture("B")]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [picture("B"), picture("C"), picture("A"), SOUND, FILM]},
    ]
    async with over([e], [p], [d]) as front:
        assert (await front.post({"model": "m", "messages": messages})).status == 200
        assert await front.metric("backhaul_router_media_total", result="encoded") == 5
    urls = [content(picture(name)) for name in "ABC"]
    assert sorted(e.media()) == sorted([urls, [content(SOUND)], [content(FILM)]])
    assert len(given(p.bodies[0])) == 5
    assert all("item_indices" not in item for item in p.bodies[0]["ec_transfer_params"].values())


async def test_pictures_of_responses_are_encoded(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    url = content(picture("A"))
    said = [{"type": "input_image", "image_url": url, "detail": "low"}, {"type": "input_text", "text": "What?"}]
    body = {"model": "m", "input": [{"role": "user", "content": said}]}
    async with over([e], [p], [d]) as front:
        assert (await front.post(body, path="/v1/responses")).status == 200
    [seen] = e.bodies
    assert seen["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
    assert given(p.bodies[0]) == named("A")
    assert p.bodies[0]["input"] == body["input"]


async def test_pictures_go_in_batches_and_all_else_alone(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    media = [picture(name) for name in "ABCDE"]
    async with over([e], [p], [d], encode_batch=2) as front:
        await front.post(looking_at(*media[:3], FILM, *media[3:], SOUND))
    assert sorted(map(len, e.media())) == [1, 1, 1, 2, 2]
    assert len(given(p.bodies[0])) == 7


def after(event: asyncio.Event, engine: StubEngine) -> Script:
    async def script(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await event.wait()
        return web.json_response(engine.whole(body))

    return script


async def test_encoders_work_at_the_same_time_and_order_does_not_matter(p: StubEngine, d: StubEngine) -> None:
    names = [f"picture{number}" for number in range(8)]
    body = looking_at(*map(picture, names))
    async with StubEncoder().running() as one, StubEncoder().running() as two, over([one, two], [p], [d]) as front:
        is_slow, both = asyncio.Event(), asyncio.Event()
        one.scripts.append(after(is_slow, one))
        two.scripts.append(after(both, two))
        turn = asyncio.create_task(front.post(body))
        await until(lambda: one.seen and two.seen, "both were asked")
        both.set()
        is_slow.set()
        assert (await turn).status == 200
        assert p.bodies[0]["messages"] == body["messages"]
        assert given(p.bodies[0]) == named(*names)
        assert {len(one.bodies), len(two.bodies)} == {1}
        told = p.bodies[0]["ec_transfer_params"]
        assert {told[name]["peer_host"] for name in one.encoded} == {one.url}
        assert {told[name]["peer_host"] for name in two.encoded} == {two.url}


async def test_picture_is_encoded_once_over_conversations(p: StubEngine, d: StubEngine) -> None:
    names = [f"picture{number}" for number in range(20)]
    async with StubEncoder().running() as one, StubEncoder().running() as two, over([one, two], [p], [d]) as front:
        for name in names * 2:
            await front.post(looking_at(picture(name), text=f"Is it {name}?"))
        assert one.encoded
        assert two.encoded
        assert (one.encoded + two.encoded) == dict.fromkeys(named(*names), 1)


async def test_decode_engine_without_a_prefill_pool_gets_them(e: StubEncoder, d: StubEngine) -> None:
    async with over([e], [], [d]) as front:
        assert (await front.post(looking_at(picture("A")))).status == 200
    assert given(d.bodies[0]) == named("A")


async def test_decode_engine_that_is_left_alone_gets_them(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with over([e], [p], [d]) as front:
        await front.post(looking_at(picture("A"), prompt_logprobs=1))
    assert p.seen == []
    assert given(d.bodies[0]) == named("A")


async def test_params_are_sealed_with_the_rest(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with over([e], [p], [d], seal_key="0123456789abcdef") as front:
        await front.post(looking_at(picture("A")))
        await front.post(looking_at(picture("A"), prompt_logprobs=1))
        keys = front.router.upstream._seals
        assert keys is not None
        for seen in (*p.seen, *d.seen):
            keys.check(seen.headers[SEAL_HEADER], seen.path, seen.body)
    assert [given(body) for body in (*p.bodies, *d.bodies)] == [named("A"), set(), named("A")]


async def test_client_cannot_name_encodings(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with over([e], [p], [d]) as front:
        await front.post(looking_at(picture("A"), ec_transfer_params={"evil": {"peer_host": "h", "peer_port": 1}}))
    assert given(p.bodies[0]) == named("A")


async def test_what_was_encoded_is_told(
    e: StubEncoder, p: StubEngine, d: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "router.turn")
    async with over([e], [p], [d]) as front:
        answer = await front.post(looking_at(picture("A"), picture("B")), headers={"X-Backhaul-Explain": "1"})
        assert answer.explain["media"] == "2; encoded=2"
        assert answer.explain["encode"] == e.url
        assert await front.metric("backhaul_router_encode_legs_total", outcome="ok") == 1
        assert await front.metric("backhaul_router_leg_seconds_count", leg="encode") == 1
        assert await front.metric("backhaul_router_engine_ready", role="encode", engine=e.url) == 1
        ready = (await front.get("/ready")).json
    assert {engine["role"]: engine["state"] for engine in ready["engines"]}["encode"] == "ready"
    [line] = [record for record in caplog.records if record.message == "turn"]
    assert (line.__dict__["media"], line.__dict__["media_encoded"]) == (2, 2)
    assert not any("base64" in str(record.__dict__) for record in caplog.records)


async def test_encoders_answer_nothing_else(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with over([e], [p], [d]) as front:
        for _ in range(4):
            await front.post({"model": "m", "prompt": "Hi"}, path="/tokenize")
            await front.post({"model": "m", "input": "Hi"}, path="/v1/embeddings")
    assert (e.seen, e.tokenized) == ([], [])


async def test_router_without_encoders_leaves_media_to_prefill(p: StubEngine, d: StubEngine) -> None:
    async with over([], [p], [d]) as front:
        answer = await front.post(looking_at(picture("A")), headers={"X-Backhaul-Explain": "1"})
    assert answer.status == 200
    assert "media" not in answer.explain
    assert "ec_transfer_params" not in p.bodies[0]


async def test_more_media_than_a_request_may_have_reach_no_engine(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with over([e], [p], [d], encode_batch=1) as front:
        answer = await front.post(looking_at(*(picture(f"{number}") for number in range(MAX_MEDIA + 1))))
        assert (answer.status, answer.error["param"]) == (400, "messages")
    assert (e.seen, p.bodies, d.bodies) == ([], [], [])


async def test_part_with_no_content_is_left_as_it_is(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    """vLLM knows what it has seen by the client's name for it."""
    known = {"type": "image_url", "image_url": None, "uuid": "seen before"}
    async with over([e], [p], [d]) as front:
        assert (await front.post(looking_at(known))).status == 200
        assert (await front.post(looking_at(known, picture("A")))).status == 200
    assert e.media() == [[content(picture("A"))]]
    assert p.bodies[1]["messages"][0]["content"][0] == known


@pytest.mark.parametrize("url", [NOBODY, ""], ids=["down", "empty pool"])
async def test_prefill_encodes_when_no_encoder_can_be_had(p: StubEngine, d: StubEngine, url: str) -> None:
    source = url or "dns://nobody.invalid:1"
    async with router_over([p], [d], NOWHERE, encode=(source,)) as front:
        answer = await front.post(looking_at(picture("A")), headers={"X-Backhaul-Explain": "1"})
        assert answer.explain["media"] == "1; local=1 (no_encoder)"
        assert await front.metric("backhaul_router_encode_fallbacks_total", reason="no_encoder") == 1
    assert "ec_transfer_params" not in p.bodies[0]


async def test_turn_with_media_is_503_when_there_must_be_an_encoder(p: StubEngine, d: StubEngine) -> None:
    async with router_over([p], [d], NOWHERE, encode=(NOBODY,), encode_required=True) as front:
        assert (await front.post(CHAT)).status == 200
        answer = await front.post(looking_at(picture("A")))
    assert (answer.status, answer.error["type"]) == (503, "ServiceUnavailableError")
    assert answer.headers["Retry-After"] == "1"
    assert len(p.seen) == 1


async def test_engine_of_another_kind_is_not_given_what_it_cannot_use(p: StubEngine, d: StubEngine) -> None:
    async with StubEncoder(owned_by="vllm").running() as e, over([e], [p], [d]) as front:
        assert (await front.post(looking_at(picture("A")))).status == 200
        assert await front.metric("backhaul_router_encode_fallbacks_total", reason="incompatible") == 1
    assert e.seen == []


async def test_encoder_that_joins_encodes_and_one_that_leaves_does_not(p: StubEngine, d: StubEngine) -> None:
    async with StubEncoder().running() as old, StubEncoder().running() as new, over([old], [p], [d]) as front:
        pool = front.router.pool
        left = pool.get("encode", old.url)
        pool.update("encode", SETTINGS, [Found(new.url)])
        await until(lambda: pool.get("encode", new.url).ready, "the new one is ready")
        left.heard(left.models)  # a look that comes late
        for number in range(6):
            await front.post(looking_at(picture(f"picture{number}")))
        assert (len(old.seen), len(new.seen)) == (0, 6)
        assert not left.ready


async def test_drained_encoder_gets_no_more(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with over([e], [p], [d]) as front:
        [engine] = front.router.pool.drain(e.url, "encode", on=True)
        assert (await front.post(looking_at(picture("A")))).status == 200
        assert (engine.state, len(e.seen)) == ("draining", 0)

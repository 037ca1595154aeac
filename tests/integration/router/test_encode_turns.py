"""Pictures over the turns of a conversation: encoded once, their KV reused by engines that tell pictures apart, and
described in place of being sent where that is wanted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.router_harness import Answer, Front, router_over, until
from tests.stub_encoder import StubEncoder, Told, content, identifier, looking_at, named, picture
from tests.stub_engine import TEXT, StubEngine, refuse
from tests.vllm_stub import VLLMStub

EXPLAIN = {"X-Backhaul-Explain": "1"}


@pytest.fixture
async def e() -> AsyncIterator[StubEncoder]:
    async with StubEncoder().running() as engine:
        yield engine


@asynccontextmanager
async def over(
    e: list[StubEncoder], p: list[StubEngine], d: list[StubEngine], redis: str, **settings: Any
) -> AsyncIterator[Front]:
    async with router_over(p, d, redis, encode=tuple(one.url for one in e), **settings) as front:
        yield front


def given(body: dict[str, Any]) -> set[str]:
    return set(body.get("ec_transfer_params") or ())


async def say(front: Front, body: dict[str, Any], conversation: str | None = None) -> Answer:
    headers = EXPLAIN | ({"X-Conversation-Id": conversation} if conversation else {})
    answer = await front.post(body, headers=headers)
    assert answer.status == 200, answer.raw
    await until(front.is_settled, "the turn is over")
    return answer


def then(body: dict[str, Any], *pictures: dict[str, Any], text: str = "And now?") -> dict[str, Any]:
    """The next turn."""
    said = {"role": "assistant", "content": TEXT}
    return {**body, "messages": [*body["messages"], said, *looking_at(*pictures, text=text)["messages"]]}


async def test_picture_of_an_earlier_turn_is_not_encoded_again(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    first = looking_at(picture("A"), text="not again")
    second = then(first, picture("B"))
    third = then(second)
    async with over([e], [p], [d], redis_url) as front:
        await say(front, first)
        answer = await say(front, second)
        assert (answer.explain["turn"], answer.explain["kv"]) == (2, "self_checked")
        assert answer.explain["media"] == "2; encoded=1; known=1"
        assert (await say(front, third)).explain["media"] == "2; known=2"
    assert e.media() == [[content(picture("A"))], [content(picture("B"))]]
    assert [given(body) for body in p.bodies] == [named("A"), named("B"), set()]
    offers = [body["kv_transfer_params"].get("remote_engine_id") for body in p.bodies]
    assert offers == [None, "decode-engine", "decode-engine"]


async def test_picture_that_is_shown_again_is_announced_again(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    first = looking_at(picture("A"), text="shown again")
    async with over([e], [p], [d], redis_url) as front:
        await say(front, first)
        await say(front, then(first, picture("A")))
    assert [given(body) for body in p.bodies] == [named("A"), named("A")]
    assert set(e.encoded.values()) == {1}


async def test_all_are_announced_to_an_engine_that_has_no_kv_of_them(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    first = looking_at(picture("A"), text="no kv left")
    async with over([e], [p], [d], redis_url) as front:
        await say(front, first)
        p.scripts.append(refuse(500, "cannot pull"))
        answer = await say(front, then(first, picture("B")))
        assert (answer.explain["attempts"], answer.explain["kv"]) == (2, "gone")
    assert [given(body) for body in p.bodies] == [named("A"), named("B"), named("A", "B")]
    assert set(e.encoded.values()) == {1}


@pytest.mark.parametrize("edited", ["picture", "order", "removed"])
async def test_edited_pictures_are_encoded_and_only_compared_by_hash(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str, edited: str
) -> None:
    first = looking_at(picture("A"), picture("B"), text=f"edited: {edited}")
    pictures = {"picture": ["A", "C"], "order": ["B", "A"], "removed": ["B"]}[edited]
    second = then(looking_at(*map(picture, pictures), text=f"edited: {edited}"))
    async with over([e], [p], [d], redis_url) as front:
        await say(front, first, edited)
        answer = await say(front, second, edited)
        assert answer.explain["kv"] == "self_checked"
        assert p.bodies[1]["kv_transfer_params"]["remote_block_hashes"]
    assert given(p.bodies[1]) == {"picture": named("C"), "order": named("A", "B"), "removed": named("B")}[edited]


@pytest.mark.parametrize("second", [["A"], ["B"], []], ids=["same", "edited", "removed"])
async def test_vllm_is_never_offered_kv_of_pictures(redis_url: str, second: list[str]) -> None:
    async with VLLMStub("prefill").running() as p, VLLMStub("decode").running() as d:
        async with StubEncoder(owned_by="vllm").running() as e, over([e], [p], [d], redis_url) as front:
            name = f"vllm {second}"
            await say(front, looking_at(picture("A"), text=name), name)
            answer = await say(front, then(looking_at(*map(picture, second), text=name)), name)
            assert answer.explain["kv"] == "media"
        assert all("remote_block_ids" not in body["kv_transfer_params"] for body in p.bodies if "messages" in body)


async def test_vllm_that_has_prefilled_a_picture_is_not_announced_it_again(redis_url: str) -> None:
    async with VLLMStub("prefill").running() as p, VLLMStub("decode").running() as d:
        async with StubEncoder(owned_by="vllm").running() as e, over([e], [p], [d], redis_url) as front:
            first = looking_at(picture("A"), text="vllm")
            await say(front, first)
            assert (await say(front, then(first, picture("B")))).explain["media"] == "2; encoded=1; known=1"
        assert [given(body) for body in p.bodies if "messages" in body] == [named("A"), named("B")]


# Descriptions in the place of media.


def described(name: str, grid: list[list[int]]) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": {"grid": grid}, "uuid": identifier(picture(name), {})}


async def test_media_are_described_to_both_engines(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    body = looking_at(picture("A"), picture("B"), picture("A"))
    async with over([e], [p], [d], redis_url, media_rewrite=True) as front:
        await say(front, body)
    one, two = described("A", [[1, 2]]), described("B", [[2, 2]])
    for leg in (p.bodies[0], d.bodies[0]):
        assert leg["messages"][0]["content"] == [one, two, one, {"type": "text", "text": "What is it?"}]
        assert given(leg) == named("A", "B")


@pytest.mark.parametrize("engine", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 500])
async def test_engine_that_fails_with_descriptions_gets_the_media(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str, engine: str, status: int
) -> None:
    body = looking_at(picture("A"))
    async with over([e], [p], [d], redis_url, media_rewrite=True) as front:
        (p if engine == "prefill" else d).scripts.append(refuse(status, "no such part"))
        await say(front, body)
    for one in (p, d):
        assert one.bodies[-1]["messages"] == body["messages"]
    assert p.bodies[0]["messages"] != body["messages"]
    assert len(p.bodies) == 2
    assert given(p.bodies[-1]) == named("A")
    assert "ec_transfer_params" not in d.bodies[-1]


async def test_request_that_is_refused_in_either_form_is_refused(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    p.scripts += [refuse(400, "bad")] * 5
    async with over([e], [p], [d], redis_url, media_rewrite=True) as front:
        answer = await front.post(looking_at(picture("A")))
        assert (answer.status, answer.error["message"]) == (400, "bad")
    assert len(p.seen) == 2


def incomplete(told: Told) -> Told:
    last = list(told)[-1]
    return {**told, last: {**told[last], "metadata": {}}}


def missing(told: Told) -> Told:
    return dict(list(told.items())[1:])


@pytest.mark.parametrize("told", [incomplete, missing])
async def test_media_are_sent_unless_all_of_them_are_described(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str, told: Any
) -> None:
    e.told = told
    body = looking_at(picture("A"), picture("B"))
    async with over([e], [p], [d], redis_url, media_rewrite=True) as front:
        await say(front, body)
    assert p.bodies[0]["messages"] == d.bodies[0]["messages"] == body["messages"]
    assert given(p.bodies[0])


@pytest.mark.parametrize("setting", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_media_are_sent_if_their_preparation_is_the_clients(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str, setting: str
) -> None:
    body = looking_at(picture("A"), **{setting: {"x": 1}})
    async with over([e], [p], [d], redis_url, media_rewrite=True) as front:
        await say(front, body)
    assert p.bodies[0]["messages"] == body["messages"]


async def test_film_with_sound_keeps_both_encodings(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    film = {"type": "video_url", "video_url": {"url": "https://example.org/film.mp4"}}

    def told(items: Told) -> Told:
        [item] = items.values()
        return {"seen": {**item, "item_indices": [0]}, "heard": {**item, "modality": "audio", "item_indices": [1]}}

    e.told = told
    body = looking_at(film)
    async with over([e], [p], [d], redis_url, media_rewrite=True) as front:
        await say(front, body)
    assert given(p.bodies[0]) == {"seen", "heard"}
    assert p.bodies[0]["messages"] == body["messages"]


async def test_stream_is_not_begun_anew_once_it_has_begun(
    e: StubEncoder, p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await d.play(request, d.events(body)[:3], cut=True)

    d.scripts.append(cut)
    async with over([e], [p], [d], redis_url, media_rewrite=True) as front:
        answer = await front.post(looking_at(picture("A"), stream=True))
        assert answer.status == 200
        assert "error" in answer.events[-1]
    assert (len(e.seen), len(p.seen), len(d.seen)) == (1, 1, 1)

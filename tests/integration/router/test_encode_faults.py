"""What becomes of a turn whose encoders fail, lie, or take too long: one clear error, or the engine that prefills
encodes; and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.router_harness import CHAT, Front, router_over, until
from tests.stub_encoder import StubEncoder, Told, looking_at, named, picture
from tests.stub_engine import StubEngine, hang_up, refuse

NOWHERE = "redis://127.0.0.1:1/0"
EXPLAIN = {"X-Backhaul-Explain": "1"}


@pytest.fixture
async def e() -> AsyncIterator[StubEncoder]:
    async with StubEncoder().running() as engine:
        yield engine


@asynccontextmanager
async def over(e: list[StubEncoder], p: list[StubEngine], d: list[StubEngine], **settings: Any) -> AsyncIterator[Front]:
    async with router_over(p, d, NOWHERE, encode=tuple(one.url for one in e), **settings) as front:
        yield front


def given(body: dict[str, Any]) -> set[str]:
    return set(body.get("ec_transfer_params") or ())


async def breaks_off(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    hang_up(request)
    return web.Response()


async def never(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


# A medium that is bad.


async def test_picture_that_an_encoder_refuses_ends_the_turn_with_its_words(
    e: StubEncoder, p: StubEngine, d: StubEngine
) -> None:
    e.scripts += [refuse(400, "not a picture"), never, never]
    async with over([e], [p], [d], encode_batch=1) as front:
        answer = await front.post(looking_at(picture("A"), picture("B"), picture("C")))
        assert (answer.status, answer.error["message"], answer.error["param"]) == (400, "not a picture", "p")
        await until(lambda: e.aborted == 2, "the other requests are ended")
        assert await front.metric("backhaul_router_encode_legs_total", outcome="refused") == 1
        assert await front.metric("backhaul_router_encode_legs_total", outcome="cancelled") == 2
        assert await front.metric("backhaul_router_turns_total", outcome="rejected") == 1
        assert (await front.post(looking_at(picture("D")))).status == 200
    assert len(p.seen) == 1


# An encoder that fails.


async def test_other_encoder_takes_over_from_one_that_dies(p: StubEngine, d: StubEngine) -> None:
    async with StubEncoder().running() as one, StubEncoder().running() as two, over([one, two], [p], [d]) as front:
        one.scripts.append(breaks_off)
        two.scripts.append(breaks_off)
        answer = await front.post(looking_at(picture("A")), headers=EXPLAIN)
        assert (len(one.seen), len(two.seen)) == (1, 1)
        assert answer.status == 502, "what has ended two engines does not meet a third"
        assert p.seen == []
        one.scripts.clear()
        two.scripts.clear()
        failing, other = (one, two)
        failing.scripts.append(refuse(500, "no memory"))
        for number in range(40):
            await front.post(looking_at(picture(f"picture{number}")))
            if not failing.scripts:
                break
        assert given(p.bodies[-1]) == named(f"picture{number}")
        assert set(other.encoded) >= given(p.bodies[-1])
        assert await front.metric("backhaul_router_retries_total", leg="encode") == 2
        assert await front.metric("backhaul_router_leg_failures_total", leg="encode", kind="status") == 1


async def test_prefill_encodes_what_a_single_encoder_fails_at(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    e.scripts += [breaks_off]
    async with over([e], [p], [d], encode_batch=1) as front:
        answer = await front.post(looking_at(picture("A"), picture("B")), headers=EXPLAIN)
        assert answer.status == 200
        assert answer.explain["media"] == "2; encoded=1; local=1 (failed)"
        assert await front.metric("backhaul_router_encode_fallbacks_total", reason="failed") == 1
        assert await front.metric("backhaul_router_media_total", result="local") == 1
    assert len(given(p.bodies[0])) == 1
    assert p.bodies[0]["messages"][0]["content"][:2] == [picture("A"), picture("B")]


async def test_failure_is_an_error_when_there_must_be_an_encoder(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    e.scripts.append(refuse(503, "full", headers={"Retry-After": "7"}))
    async with over([e], [p], [d], encode_required=True) as front:
        answer = await front.post(looking_at(picture("A")))
    assert (answer.status, answer.error["message"], answer.headers["Retry-After"]) == (503, "full", "7")
    assert p.seen == []


async def test_slow_encoder_is_not_waited_for(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    e.scripts.append(never)
    async with over([e], [p], [d], encode_timeout=0.05) as front:
        assert (await front.post(looking_at(picture("A")))).status == 200
        assert await front.metric("backhaul_router_leg_failures_total", leg="encode", kind="timeout") == 1
        await until(lambda: e.aborted == 1, "the request there is ended")
    assert given(p.bodies[0]) == set()


async def test_encoder_that_fails_again_and_again_is_spared(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with StubEncoder().running() as other, over([e, other], [p], [d], retry_share=1.0) as front:
        engine = front.router.pool.get("encode", e.url)
        e.scripts += [refuse(500)] * 100
        for number in range(100):
            await front.post(looking_at(picture(f"picture{number}")))
            if engine.state == "suspect":
                break
        assert engine.state == "suspect"
        num_asked = len(e.seen)
        for number in range(10):
            await front.post(looking_at(picture(f"other{number}")))
        assert len(e.seen) == num_asked
        assert all(given(body) for body in p.bodies)


# An encoder that says what is not so.


@pytest.mark.parametrize(
    "params",
    [
        [],
        "params",
        {"x": 5},
        {"x": {"modality": "image", "peer_port": "5601"}},
        {"x": {"modality": "image", "shape": [1, 2, 3]}},
        {"x": {"modality": "image", "item_indices": [-1]}},
    ],
    ids=str,
)
async def test_nonsense_is_not_passed_on(e: StubEncoder, p: StubEngine, d: StubEngine, params: object) -> None:
    e.told = lambda told: params
    async with over([e], [p], [d]) as front:
        assert (await front.post(looking_at(picture("A"), picture("B")))).status == 200
        assert await front.metric("backhaul_router_leg_failures_total", leg="encode", kind="nonsense") == 1
        assert await front.metric("backhaul_router_encode_fallbacks_total", reason="failed") == 1
    assert "ec_transfer_params" not in p.bodies[0]


async def test_answer_that_is_no_json_is_not_passed_on(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async def script(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=b"{", content_type="application/json")

    e.scripts.append(script)
    async with over([e], [p], [d]) as front:
        assert (await front.post(looking_at(picture("A")))).status == 200
    assert "ec_transfer_params" not in p.bodies[0]


def without_indices(told: Told) -> Told:
    return {name: {key: value for key, value in item.items() if key != "item_indices"} for name, item in told.items()}


@pytest.mark.parametrize(
    "told",
    [
        without_indices,
        lambda told: {name: {**item, "item_indices": [9]} for name, item in told.items()},
        lambda told: {name: {**item, "item_indices": [0]} for name, item in told.items()},
        lambda told: {**told, "stranger": {"modality": "image"}},
    ],
    ids=["no indices", "out of range", "twice the same", "one too many"],
)
async def test_batch_that_cannot_be_told_apart_is_asked_for_one_by_one(
    e: StubEncoder, p: StubEngine, d: StubEngine, told: Any
) -> None:
    e.told = lambda items: told(items) if len(items) > 1 else items
    async with over([e], [p], [d]) as front:
        assert (await front.post(looking_at(picture("A"), picture("B")))).status == 200
        assert await front.metric("backhaul_router_media_total", result="encoded") == 2
    assert list(map(len, e.media())) == [2, 1, 1]
    assert set(e.encoded.values()) == {1}
    assert given(p.bodies[0]) == named("A", "B")


async def test_what_cannot_be_told_apart_even_then_is_left_to_prefill(
    e: StubEncoder, p: StubEngine, d: StubEngine
) -> None:
    e.told = lambda told: without_indices(told) | {"stranger": {"modality": "image"}}
    async with over([e], [p], [d]) as front:
        assert (await front.post(looking_at(picture("A"), picture("B")))).status == 200
        assert await front.metric("backhaul_router_encode_fallbacks_total", reason="ambiguous") == 2
    assert "ec_transfer_params" not in p.bodies[0]


@pytest.mark.parametrize("told", [lambda told: None, lambda told: {}], ids=["no params", "no items"])
async def test_what_an_encoder_has_no_room_for_is_left_to_prefill(
    e: StubEncoder, p: StubEngine, d: StubEngine, told: Any
) -> None:
    e.told = told
    async with over([e], [p], [d]) as front:
        answer = await front.post(looking_at(picture("A"), picture("B")), headers=EXPLAIN)
        assert answer.explain["media"] == "2; local=2 (unannounced)"
    assert "ec_transfer_params" not in p.bodies[0]


async def test_one_of_several_may_be_missing(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    e.told = lambda told: dict(list(told.items())[1:])
    async with over([e], [p], [d]) as front:
        answer = await front.post(looking_at(picture("A"), picture("B"), picture("C")), headers=EXPLAIN)
        assert answer.explain["media"] == "3; encoded=2; local=1 (unannounced)"
    assert given(p.bodies[0]) == named("B", "C")


async def test_pictures_that_turn_out_to_be_the_same_share_an_encoding(
    e: StubEncoder, p: StubEngine, d: StubEngine
) -> None:
    e.told = lambda told: {"one": {**next(iter(told.values())), "item_indices": [0, 1]}}
    async with over([e], [p], [d]) as front:
        assert (await front.post(looking_at(picture("A"), picture("a")))).status == 200
    assert len(e.seen) == 1
    assert given(p.bodies[0]) == {"one"}


# An engine that fails with what encoders said.


async def test_retry_begins_anew_with_the_clients_body(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    """The handles of the last attempt are not inherited."""
    generation = 0

    def told(items: Told) -> Told:
        nonlocal generation
        generation += 1
        return {f"{name}-{generation}": item for name, item in items.items()}

    e.told = told
    p.scripts.append(refuse(500, "encoding missing"))
    body = looking_at(picture("A"))
    async with over([e], [p], [d]) as front:
        answer = await front.post(body, headers=EXPLAIN)
        assert (answer.status, answer.explain["attempts"]) == (200, 2)
        first, second = p.bodies
        [name] = named("A")
        assert (given(first), given(second)) == ({f"{name}-1"}, {f"{name}-2"})
        assert first["messages"] == second["messages"] == body["messages"]
        assert front.router.pool.get("prefill", p.url).state == "ready"
        d.scripts.append(refuse(500, "cannot decode"))
        assert (await front.post(body)).status == 200
        assert given(p.bodies[-2]) == {f"{name}-3"}
        assert given(p.bodies[-1]) == {f"{name}-4"}
        assert all("ec_transfer_params" not in leg for leg in d.bodies)
    assert set(e.encoded.values()) == {1}


async def test_engine_that_fails_again_is_not_asked_for_ever(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    p.scripts += [refuse(500, "encoding missing")] * 9
    async with over([e], [p], [d]) as front:
        answer = await front.post(looking_at(picture("A")))
        assert (answer.status, answer.error["message"]) == (500, "encoding missing")
    assert len(p.seen) == 2


async def test_params_that_prefill_refuses_are_made_anew(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async def script(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        error = {"message": "no", "type": "BadRequestError", "param": "ec_transfer_params.x", "code": 400}
        return web.json_response({"error": error}, status=400)

    p.scripts.append(script)
    async with over([e], [p], [d]) as front:
        assert (await front.post(looking_at(picture("A")))).status == 200
    assert (len(e.seen), len(p.seen)) == (2, 2)


# A client that leaves.


async def test_client_that_leaves_takes_every_request_with_it(p: StubEngine, d: StubEngine) -> None:
    async with StubEncoder().running() as one, StubEncoder().running() as two:
        one.scripts += [never] * 8
        two.scripts += [never] * 8
        async with over([one, two], [p], [d], encode_batch=1) as front:
            turn = asyncio.create_task(front.post(looking_at(*(picture(str(number)) for number in range(8)))))
            await until(lambda: len(one.seen) + len(two.seen) == 8, "all are asked")
            turn.cancel()
            await until(lambda: one.aborted + two.aborted == 8, "all are ended")
            await until(front.is_idle, "nothing is left")
            assert await front.metric("backhaul_router_encode_legs_total", outcome="cancelled") == 8
            assert await front.metric("backhaul_router_turns_total", outcome="client_gone") == 1
            assert (await front.post(CHAT)).status == 200
    assert len(p.seen) == 1


async def test_turn_is_aborted_while_its_media_are_encoded(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    e.scripts.append(never)
    async with over([e], [p], [d]) as front:
        turn = asyncio.create_task(front.post(looking_at(picture("A")), headers={"X-Request-Id": "r"}))
        await until(lambda: e.seen, "it is asked")
        await front.post({"request_ids": ["r"]}, path="/inference/v1/abort_requests")
        answer = await turn
        assert (answer.status, answer.error["code"]) == (409, "aborted")
        await until(lambda: e.aborted == 1, "the request there is ended")
    assert p.seen == []


async def test_room_for_prefill_is_given_back_when_encoding_fails(e: StubEncoder, p: StubEngine, d: StubEngine) -> None:
    async with over([e], [p], [d], prefill_limit=1, queue_timeout=0.5) as front:
        for _ in range(3):
            e.scripts.append(refuse(400))
            assert (await front.post(looking_at(picture("A")))).status == 400
        assert (await front.post(looking_at(picture("A")))).status == 200

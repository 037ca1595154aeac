"""Encode, prefill and decode engines behind the router answer as one engine does alone, with a model that sees; and
counters say that each picture was encoded once."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.engines import Engine, engine_command, engines
from tests.router_harness import Answer, Front, router_over, until
from tests.tiny_vlm import make_tiny_vlm

pytest.importorskip("PIL")

EXPLAIN = {"X-Backhaul-Explain": "1"}
SAMPLING = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
SEAL_KEY = "0123456789abcdef"


@dataclass
class Fleet:
    alone: Engine
    e: Engine
    p: Engine
    d: Engine


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("engines")
    model = make_tiny_vlm(folder / "vlm")
    common = ("--dtype", "float32", "--served-model-name", "vlm", "--seal-key", SEAL_KEY)
    transfer = ("--kv-transfer-config.kv-connector-extra-config.kv-recompute-threshold", "0")
    commands = [
        engine_command(model, *common, "--role", "both"),
        engine_command(model, *common, "--role", "encode"),
        engine_command(model, *common, "--role", "prefill", *transfer),
        engine_command(model, *common, "--role", "decode", *transfer),
    ]
    with engines(folder, *commands) as running:
        yield Fleet(*running)


@pytest.fixture
async def front(fleet: Fleet, redis_url: str) -> AsyncIterator[Front]:
    async with router_over(
        [fleet.p.url],
        [fleet.d.url],
        redis_url,
        encode=(fleet.e.url,),
        kv_recompute_threshold=0,
        seal_key=SEAL_KEY,
    ) as front:
        yield front


def drawn(seed: int, width: int = 48, height: int = 40) -> dict[str, Any]:
    """A picture that nobody has seen."""
    from PIL import Image

    image = Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(*messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    told = [{"role": roles[number % 2], "content": content} for number, content in enumerate(messages)]
    return {"model": "vlm", "messages": told, **SAMPLING, **body}


def ids_of(answer: Answer, *, stream: bool) -> list[int]:
    assert answer.status == 200, answer.raw
    if not stream:
        return list(answer.json["choices"][0]["token_ids"])
    choices = [event["choices"][0] for event in answer.events if isinstance(event, dict) and event.get("choices")]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


async def both(front: Front, fleet: Fleet, body: dict[str, Any], *, conversation: str | None = None) -> Answer:
    """The router's answer, which is that of the engine alone."""
    headers = EXPLAIN | ({"X-Conversation-Id": conversation} if conversation else {})
    async with front.client.post(f"{fleet.alone.url}/v1/chat/completions", json={**body, "stream": False}) as whole:
        expected = await whole.json(content_type=None)
        assert whole.status == 200, expected
    answer = await front.post(body, headers=headers)
    stream = bool(body.get("stream"))
    assert ids_of(answer, stream=stream) == expected["choices"][0]["token_ids"]
    await until(front.is_settled, "the turn is over")
    return answer


def encodes(engine: Engine) -> int:
    return int(engine.metrics().get("backhaul_engine_encodes_total", 0))


PROMPTS = {
    "none": lambda seed: [say("How are you?")],
    "one": lambda seed: [drawn(seed), say("What is it?")],
    "two": lambda seed: [drawn(seed), say("and"), drawn(seed + 1, 96, 48), say("?")],
    "three, one twice": lambda seed: [drawn(seed), drawn(seed + 1), say("like"), drawn(seed), say("?")],
    "four": lambda seed: [say("Look:"), *(drawn(seed + number, 24 + 8 * number, 40) for number in range(4))],
    "four, another order": lambda seed: [*(drawn(seed + number) for number in (3, 1, 0, 2)), say("?")],
}
DISTINCT = {"none": 0, "one": 1, "two": 2, "three, one twice": 2, "four": 4, "four, another order": 4}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_answers_are_those_of_one_engine(front: Front, fleet: Fleet, prompt: str, stream: bool) -> None:
    seed = 1000 * list(PROMPTS).index(prompt) + 100 * stream
    before, at_p = encodes(fleet.e), encodes(fleet.p)
    answer = await both(front, fleet, chat(PROMPTS[prompt](seed), stream=stream))
    assert encodes(fleet.e) - before == DISTINCT[prompt]
    assert encodes(fleet.p) == at_p
    if DISTINCT[prompt]:
        assert answer.explain["media"] == f"{DISTINCT[prompt]}; encoded={DISTINCT[prompt]}"


async def test_pictures_are_seen(front: Front, fleet: Fleet) -> None:
    """Else all of the above would show nothing."""
    answers = {
        tuple(ids_of(await front.post(chat([drawn(seed), say("?")])), stream=False)) for seed in range(9000, 9006)
    }
    assert len(answers) > 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_next_turn_reuses_kv_of_the_picture(front: Front, fleet: Fleet, stream: bool) -> None:
    seed = 20_000 + stream
    first = [drawn(seed, 64, 64), say("Describe it, please, in all its detail and with every colour that there is.")]
    before, at_p, at_d = encodes(fleet.e), encodes(fleet.p), encodes(fleet.d)
    body = chat(first, stream=stream)
    answer = await both(front, fleet, body)
    text = answer.text if stream else answer.text_of_whole
    second = [drawn(seed + 500), say("And this one?")]
    body = chat(first, [say(text)], second, stream=stream)
    answer = await both(front, fleet, body)
    assert answer.explain["turn"] == 2
    assert answer.explain["kv"] == "self_checked"
    assert answer.explain["media"] == "2; encoded=1; known=1"
    assert encodes(fleet.e) - before == 2
    assert (encodes(fleet.p), encodes(fleet.d)) == (at_p, at_d)


async def test_kv_of_another_picture_is_not_used(front: Front, fleet: Fleet) -> None:
    def turn(seed: int, *more: list[dict[str, Any]]) -> dict[str, Any]:
        return chat([say("Look at what I have here today:"), drawn(seed, 64, 64), say("What is it?")], *more)

    answer = await both(front, fleet, turn(30_000), conversation="edited")
    said = [say(answer.text_of_whole)], [say("Are you sure?")]
    answer = await both(front, fleet, turn(30_001, *said), conversation="edited")
    assert answer.explain["kv"] == "self_checked"
    num_reused = answer.explain.get("tokens_pulled", 0) + answer.explain.get("tokens_reused", 0)
    assert num_reused < answer.explain["prompt_tokens"] / 2


async def test_picture_is_encoded_once_over_conversations(front: Front, fleet: Fleet) -> None:
    before = encodes(fleet.e), encodes(fleet.p)
    for number in range(4):
        await both(front, fleet, chat([say(f"Question {number}:"), drawn(40_000), say("?")]))
    assert (encodes(fleet.e) - before[0], encodes(fleet.p) - before[1]) == (1, 0)


async def test_engines_that_get_descriptions_answer_the_same(fleet: Fleet, redis_url: str) -> None:
    async with router_over(
        [fleet.p.url], [fleet.d.url], redis_url, encode=(fleet.e.url,), media_rewrite=True, seal_key=SEAL_KEY
    ) as front:
        body = chat([drawn(50_000), say("and"), drawn(50_001, 96, 48), drawn(50_000), say("?")])
        answer = await both(front, fleet, body)
        assert answer.explain["attempts"] == 1, "none of them has refused"
        assert await front.metric("backhaul_router_leg_failures_total") == 0


async def test_prefill_encodes_without_encoders(fleet: Fleet, redis_url: str) -> None:
    async with router_over([fleet.p.url], [fleet.d.url], redis_url, seal_key=SEAL_KEY) as front:
        before = encodes(fleet.p)
        await both(front, fleet, chat([drawn(60_000), say("?")]))
        assert encodes(fleet.p) - before == 1


async def test_decode_alone_fetches_encodings(fleet: Fleet, redis_url: str) -> None:
    async with router_over([], [fleet.d.url], redis_url, encode=(fleet.e.url,), seal_key=SEAL_KEY) as front:
        before = encodes(fleet.d)
        await both(front, fleet, chat([drawn(70_000), say("?")]))
        assert encodes(fleet.d) == before


async def test_picture_that_is_none_is_refused_in_words(front: Front) -> None:
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = await front.post(chat([drawn(80_000), bad, say("?")]))
    assert (answer.status, answer.error["type"]) == (400, "BadRequestError")
    assert (await front.post(chat([say("Hi")]))).status == 200


async def test_encoder_that_is_killed_at_its_work_costs_no_answer(front: Front, fleet: Fleet) -> None:
    """The last of them: nothing encodes after it."""
    before = encodes(fleet.p)
    fleet.e.process.send_signal(signal.SIGSTOP)
    turn = asyncio.create_task(both(front, fleet, chat([drawn(90_000), say("?")])))
    assert (await front.post(chat([say("Meanwhile?")]))).status == 200
    engine = front.router.pool.get("encode", fleet.e.url)
    await until(lambda: engine.in_flight == 1, "it is asked")
    fleet.e.process.kill()
    answer = await turn
    assert answer.explain["media"] == "1; local=1 (failed)"
    assert encodes(fleet.p) - before == 1
    await until(lambda: engine.state == "ejected", "it is known to be gone")
    answer = await both(front, fleet, chat([drawn(90_001), say("?")]))
    assert answer.explain["media"] == "1; local=1 (no_encoder)"

"""Conversations of several turns over real vLLM: every answer is that of an engine without a cache, whatever the client
does to its history, and what was computed once is not computed again."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.histories import SCRIPTS, asked, told
from tests.interop.conftest import Fleet
from tests.interop.engines import BLOCK_SIZE
from tests.interop.routers import RouterProcess
from tests.interop.talk import ANSWER_TOKENS, COMPUTED, PULLED_BYTES, Talker, client, counted

PARALLEL = 20


@pytest.mark.parametrize("how", ["stream", "whole", "stream_33"])
async def test_every_answer_is_that_of_an_engine_alone(
    fleet: Fleet, router: RouterProcess, router_33: RouterProcess, how: str
) -> None:
    front = router_33 if how == "stream_33" else router
    async with client() as session:

        async def play(script: str) -> Talker:
            talker = Talker(session, front.url, fleet.truth.url, how != "whole", conversation=f"{script} {how}")
            await SCRIPTS[script](talker.say, random.Random(f"{script} {how}"))
            return talker

        talkers = dict(zip(SCRIPTS, await asyncio.gather(*map(play, SCRIPTS)), strict=True))
    # vLLM 0.32 puts no params into streams: there nothing is left for the next turn to pull.
    assert talkers["plain"].num_offered == (0 if how == "stream" else 2), talkers["plain"].plans
    if how != "stream":
        assert talkers["edited_late"].num_offered == 2, talkers["edited_late"].plans


@pytest.mark.parametrize("how", ["whole", "stream_33"])
async def test_later_turns_pull_and_compute_only_what_is_new(
    fleet: Fleet, router: RouterProcess, router_33: RouterProcess, how: str
) -> None:
    front, decode = (router_33, fleet.decode_33) if how == "stream_33" else (router, fleet.decode)
    chooser = random.Random(how)
    async with client() as session:
        talker = Talker(session, front.url, fleet.truth.url, how != "whole")
        messages = [told(chooser, "Anna")]
        known = 0
        for turn in range(3):
            if turn:
                messages.append(asked(chooser))
            before = await counted(session, fleet.prefill.url), await counted(session, decode.url)
            messages.append({"role": "assistant", "content": await talker.say(messages)})
            after = await counted(session, fleet.prefill.url), await counted(session, decode.url)
            new = talker.prompt_tokens[-1] - known
            known = talker.prompt_tokens[-1] + ANSWER_TOKENS
            assert after[0][COMPUTED] - before[0][COMPUTED] <= new + 2 * BLOCK_SIZE, f"turn {turn + 1}"
            assert after[1][COMPUTED] == before[1][COMPUTED], f"turn {turn + 1}: decode computed some of the prompt"
            assert (after[0][PULLED_BYTES] > before[0][PULLED_BYTES]) == (turn > 0), f"turn {turn + 1}"
            assert after[1][PULLED_BYTES] > before[1][PULLED_BYTES], f"turn {turn + 1}"


async def test_conversations_side_by_side_do_not_meet(fleet: Fleet, router: RouterProcess) -> None:
    async with client() as session:

        async def one(number: int) -> None:
            talker = Talker(session, router.url, fleet.truth.url, stream=number % 2 == 0)
            await SCRIPTS["plain"](talker.say, random.Random(number))

        await asyncio.gather(*(one(number) for number in range(PARALLEL)))


async def test_unknown_model_is_refused_without_asking_an_engine(fleet: Fleet, router: RouterProcess) -> None:
    async with client() as session:
        before = await counted(session, fleet.prefill.url)
        asking = {"model": "nobody", "messages": [{"role": "user", "content": "Hi"}]}
        async with session.post(router.url + "/v1/chat/completions", json=asking) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "model_not_found"
        assert await counted(session, fleet.prefill.url) == before

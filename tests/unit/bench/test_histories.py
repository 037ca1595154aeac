from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bench.chat import Message
from bench.histories import SCRIPTS


async def asked_by(script: str, seed: int = 1) -> list[list[Message]]:
    """All requests of a script whose every answer is new."""
    requests: list[list[Message]] = []

    async def say(messages: list[Message]) -> str:
        requests.append([dict(message) for message in messages])
        return f"answer {len(requests)}"

    await SCRIPTS[script](say, random.Random(seed))
    return requests


@pytest.mark.parametrize("script", SCRIPTS)
async def test_request_ends_with_a_question_and_roles_take_turns(script: str) -> None:
    for messages in await asked_by(script):
        roles = [message["role"] for message in messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


@pytest.mark.parametrize("script", SCRIPTS)
async def test_script_of_one_seed_is_always_the_same(script: str) -> None:
    assert await asked_by(script, 3) == await asked_by(script, 3)
    assert await asked_by(script, 3) != await asked_by(script, 4)


async def test_only_the_plain_one_always_goes_on_from_the_last_answer() -> None:
    for script in SCRIPTS:
        requests = await asked_by(script)
        goes_on = all(
            later[: len(last) + 1] == [*last, {"role": "assistant", "content": f"answer {number}"}]
            for number, (last, later) in enumerate(pairwise(requests), start=1)
        )
        assert goes_on == (script == "plain"), script


async def test_edit_leaves_the_rest_as_it_was() -> None:
    *_, before, after = await asked_by("edited")
    assert [old == new for old, new in zip(before, after, strict=False)] == [False, True, True]

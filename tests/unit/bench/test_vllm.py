from __future__ import annotations

import argparse

import aiohttp
import pytest
from aiohttp import web

from bench import vllm
from bench.histories import SCRIPTS
from tests.stub_engine import StubEngine, refuse

OPTIONS = argparse.Namespace(model="m", rounds=1, conversations=1, history=5, new=3, answer=4, seed="1", truth="")


async def test_same_answers_are_not_wrong_and_refusals_are_failures(capsys: pytest.CaptureFixture[str]) -> None:
    async with StubEngine("decode").running() as truth, StubEngine("decode").running() as target:
        target.scripts.extend(refuse(500) for _ in range(3))
        options = argparse.Namespace(**{**vars(OPTIONS), "truth": truth.url})
        async with aiohttp.ClientSession() as session:
            counts = await vllm.wrong_answers(session, {"good": truth.url, "bad": target.url}, options)
    assert {key for key in counts["good"] if counts["good"][key]} == {f"{row} all" for row in vllm.ROWS}
    assert sum(counts["bad"][f"{row} failed"] for row in vllm.ROWS) == 3
    vllm.print_wrong_answers(counts)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("| all | 0 wrong of ")
    assert ", 3 failed |" in printed


async def test_another_answer_is_wrong() -> None:
    async with StubEngine("decode").running() as truth, StubEngine("decode").running() as target:
        target.scripts.extend(truncated for _ in range(1000))
        options = argparse.Namespace(**{**vars(OPTIONS), "truth": truth.url})
        async with aiohttp.ClientSession() as session:
            counts = await vllm.wrong_answers(session, {"one": target.url}, options)
    for script in SCRIPTS:
        assert counts["one"][f"{script} whole wrong"] == counts["one"][f"{script} whole all"] > 0


async def truncated(request: object, body: dict[str, object]) -> web.StreamResponse:
    engine = StubEngine("decode")
    answer = engine.whole(body)
    answer["choices"][0]["message"]["content"] = "Gr"
    return web.json_response(answer)


async def test_times_are_told_by_target_and_turn(capsys: pytest.CaptureFixture[str]) -> None:
    async with StubEngine("decode").running() as one, StubEngine("decode").running() as other:
        async with aiohttp.ClientSession() as session:
            seconds = await vllm.first_tokens(session, {"a": one.url, "b": other.url}, OPTIONS)
        assert [len(body["messages"]) for body in one.bodies] == [1, 3, 5, 7, 9]
        assert one.bodies[0]["messages"] != other.bodies[0]["messages"], "neither is to profit from the other"
    vllm.print_first_tokens(seconds)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| turn | a, s | b, s | a / a | b / a |"
    assert len(lines) == 3 + vllm.TURNS

"""Tokens for tokens on one real engine process: the same answers as from the endpoints that take text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines import Engine, engine_command, engines, wait_until

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hello world"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engines(tmp_path_factory.mktemp("tokens"), engine_command(tiny_model)) as (engine,):
        yield engine
        assert "Traceback" not in engine.log.read_text()


def ask(engine: Engine, path: str, body: dict[str, Any]) -> Any:
    status, answer = engine.post(path, body)
    assert status == 200, answer
    return answer


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created", "usage")}


def test_chat_by_way_of_render_generate_and_derender(engine: Engine) -> None:
    body = {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, **GREEDY}
    direct = ask(engine, CHAT, body)
    rendered = ask(engine, f"{CHAT}/render", body)
    generated = ask(engine, GENERATE, rendered)
    answer = ask(engine, f"{CHAT}/derender", {"generate_response": generated, "chat_request": body})
    assert without_times(answer) == without_times(direct)
    message = ask(engine, GENERATE, rendered | {"output_mode": "derender"})["choices"][0]["message"]
    assert message == direct["choices"][0]["message"]


def test_completions_by_way_of_render_generate_and_derender(engine: Engine) -> None:
    body = {"prompt": ["once upon a time", "hello"], "logprobs": 3, **GREEDY}
    direct = ask(engine, COMPLETIONS, body)
    generated = [ask(engine, GENERATE, each) for each in ask(engine, f"{COMPLETIONS}/render", body)]
    answer = ask(engine, f"{COMPLETIONS}/derender", {"generate_responses": generated, "completion_request": body})
    assert without_times(answer) == without_times(direct)


def test_logprobs_of_an_echoed_prompt_are_those_of_the_tokens_generated(engine: Engine) -> None:
    """The model is asked twice about the same text: as it writes it, and as it is given it."""
    body = {"prompt": "once upon a time", "logprobs": 0, "return_token_ids": True, **GREEDY}
    (written,) = ask(engine, COMPLETIONS, body)["choices"]
    whole = written["prompt_token_ids"] + written["token_ids"]
    (given,) = ask(engine, COMPLETIONS, body | {"prompt": whole, "echo": True, "max_tokens": 0})["choices"]
    told = written["logprobs"]["token_logprobs"]
    assert given["token_ids"] == []
    assert len(given["logprobs"]["token_logprobs"]) == len(whole)
    assert given["logprobs"]["token_logprobs"][-len(told) :] == pytest.approx(told, abs=1e-3)


def test_aborted_request_answers_and_leaves_nothing(engine: Engine) -> None:
    body = {"token_ids": [1, 2, 3], "request_id": "mine", "sampling_params": {"ignore_eos": True}}

    def aborted() -> bool:
        return bool(ask(engine, "/inference/v1/abort_requests", {"request_ids": ["mine"]})["aborted"])

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, engine, GENERATE, body)
        wait_until(aborted, 10, "the request is found")
        assert answer.result(30)["choices"][0]["finish_reason"] == "abort"
    wait_until(lambda: engine.metrics()["vllm:num_requests_running"] == 0, 10, "the request has gone")
    assert engine.metrics()["vllm:kv_cache_usage_perc"] == 0

"""One real engine process with a tiny model: the API as clients see it, and how the process starts and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.integration.engines import Engine, engine_command, engines, wait_until

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    command = engine_command(tiny_model, "--served-model-name", "tiny", "--max-body-bytes", "1000000")
    with engines(tmp_path_factory.mktemp("lone"), command) as (engine,):
        yield engine
        assert "Traceback" not in engine.log.read_text()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def running(engine: Engine) -> float:
    return engine.metrics()["vllm:num_requests_running"] + engine.metrics()["vllm:num_requests_waiting"]


def test_chat_stream_equals_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert whole.choices[0].finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens_details is not None


def test_completion_stream_equals_answer_with_and_without_stop(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 40, **GREEDY}
    full = client.completions.create(**request).choices[0].text
    stop = full[10:13]
    expected = full[: full.index(stop)]
    whole = client.completions.create(**request, stop=[stop])
    streamed = "".join(c.choices[0].text for c in client.completions.create(**request, stop=[stop], stream=True))
    assert whole.choices[0].text == streamed == expected
    assert whole.choices[0].finish_reason == "stop"


def test_sampling_with_a_seed_repeats(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 16, "seed": 7, "temperature": 1.5}
    texts = {client.completions.create(**request).choices[0].text for _ in range(3)}
    assert len(texts) == 1


def test_prefix_is_found_again(client: OpenAI) -> None:
    prompt = list(range(100, 180))
    request: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **GREEDY}
    first, second = client.completions.create(**request), client.completions.create(**request)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 64


def test_sampled_ids_of_an_answer_are_found_again_in_the_next_prompt(engine: Engine) -> None:
    """/tokenize puts the known ids where it would cut the same text otherwise, and the prefix cache has their KV."""
    letters = [engine.post("/tokenize", {"prompt": letter})[1]["tokens"][0] for letter in " hello the"]
    _, whole = engine.post("/tokenize", {"prompt": " hello the"})
    assert whole["tokens"] != letters
    known, text = letters * 8, " hello the" * 8
    ask = {"max_tokens": 1, "temperature": 0, "stream": True, "return_token_ids": True}
    first = stream(engine, ask | {"prompt": known})[0]
    assert (first["num_cached_tokens"], first["choices"][0]["prompt_token_ids"]) == (0, known)
    _, spliced = engine.post("/tokenize", {"prompt": text + " world", "known_token_ids": known})
    assert spliced["tokens"][: len(known)] == known
    assert spliced["num_spliced"] == len(known)
    assert engine.post("/detokenize", {"tokens": spliced["tokens"]})[1] == {"prompt": text + " world"}
    first = stream(engine, ask | {"prompt": spliced["tokens"]})[0]
    assert first["num_cached_tokens"] == len(known) // 16 * 16


def stream(engine: Engine, body: dict[str, Any]) -> list[Any]:
    request = urllib.request.Request(f"{engine.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        events = answer.read().decode().split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_client_lists_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_are_those_the_client_knows(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[1] * 5000)
    assert long.value.code == "context_length_exceeded"
    assert "4096" in str(long.value)
    assert "5000" in str(long.value)
    with pytest.raises(BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"


def test_body_over_the_limit_is_413(engine: Engine) -> None:
    status, answer = engine.post("/v1/completions", {"prompt": "x" * 1_000_001})
    assert status == 413
    assert "1000000 bytes" in answer["error"]["message"]


async def test_many_at_once(engine: Engine) -> None:
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def one(index: int) -> str:
            prompt = [1 + index] * (1 + 7 * index)
            answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=12, **GREEDY)
            return answer.choices[0].text

        together = await asyncio.gather(*(one(index) for index in range(40)))
        alone = [await one(index) for index in range(0, 40, 9)]
    assert [together[index] for index in range(0, 40, 9)] == alone


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_stop_their_requests(engine: Engine, stream: bool) -> None:
    before = engine.metrics()
    body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    async with aiohttp.ClientSession(engine.url) as session:

        async def leave() -> None:
            with pytest.raises(TimeoutError):
                async with session.post(
                    "/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=0.5)
                ) as response:
                    await response.read()

        await asyncio.gather(*(leave() for _ in range(10)))
    await asyncio.to_thread(wait_until, lambda: running(engine) == 0, 5, "no request is left")
    after = engine.metrics()
    assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == 10
    abort = next(name for name in after if "request_success" in name and 'finished_reason="abort"' in name)
    assert after[abort] - before[abort] == 10
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_clients_that_leave_at_any_moment_leave_no_traceback(engine: Engine) -> None:
    port = int(engine.url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for index in range(40):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall((head + body)[: 20 + 8 * index])
            if index >= 30:
                sock.recv(50 * (index - 30) + 1)
    wait_until(lambda: running(engine) == 0, 5, "no request is left")
    assert "Traceback" not in engine.log.read_text()


def test_metric_names(engine: Engine) -> None:
    names = {name.split("{")[0] for name in engine.metrics()}
    expected = {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:nixl_xfer_time_seconds_count",
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_num_failed_transfers_total",
        "backhaul_engine_blocks_pinned",
        "backhaul_engine_leases_held",
        "backhaul_engine_tokenizer_calls_total",
        "backhaul_engine_kv_pulls_failed_total",
        "backhaul_engine_handshake_failures_total",
    }
    assert expected <= names


def test_junk_does_not_add_series(engine: Engine) -> None:
    before = set(engine.metrics())
    for index in range(200):
        engine.post(f"/path/{index}", {"model": f"m{index}"})
        engine.post("/v1/completions", {"model": f"m{index}", "prompt": "a"})
    assert len(set(engine.metrics()) - before) < 20


def test_counters_add_up(engine: Engine) -> None:
    before = engine.metrics()
    _, answer = engine.post("/v1/completions", {"prompt": "add this up", "max_tokens": 5, "ignore_eos": True})
    after = engine.metrics()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert grown("vllm:prompt_tokens_by_source_total") == answer["usage"]["prompt_tokens"]
    assert grown("vllm:generation_tokens_total") == 5
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:inter_token_latency_seconds_count") == 4
    assert grown("backhaul_engine_tokenizer_calls_total") == 1


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def fails(*command: str) -> str:
    """The one line an engine that cannot start leaves."""
    run = subprocess.run([*command, "--log-level", "error"], capture_output=True, text=True, timeout=60)
    assert run.returncode in (1, 2), run
    assert run.stdout == ""
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    return lines[0]


def test_taken_port_is_one_line_and_costs_no_model_load(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}" in fails(*engine_command(tiny_model, "--port", port))


@pytest.mark.parametrize(
    ("model", "flags", "fragment"),
    [
        ("/does/not/exist", (), "/does/not/exist does not exist"),
        (None, ("--host", "192.0.2.7"), "192.0.2.7"),
        (None, ("--json-file", "/does/not/exist/f.json"), "--json-file"),
    ],
)
def test_what_cannot_work_is_one_line(
    model: str | None, flags: tuple[str, ...], fragment: str, tiny_model: Path
) -> None:
    assert fragment in fails(*engine_command(model or tiny_model, "--port", "0", *flags))


def test_drain_timeout_aborts_what_is_left(tiny_model: Path, tmp_path: Path) -> None:
    with engines(tmp_path, engine_command(tiny_model, "--drain-timeout", "0.2")) as (engine,):
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{engine.url}/v1/completions", body)) as stream:
            stream.readline()
            assert engine.stop() == 0
            rest = stream.read()
        assert b'"error"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")


def test_second_signal_ends_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with engines(tmp_path, engine_command(tiny_model)) as (engine,):
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{engine.url}/v1/completions", body)) as stream:
            stream.readline()
            engine.process.send_signal(signal.SIGINT)
            wait_until(lambda: _status(f"{engine.url}/health") == 503, 5, "it drains")
            assert engine.stop(signal.SIGINT) == 128 + signal.SIGINT


def test_sigterm_drains_then_ends(engine: Engine) -> None:
    """Last, for it ends the engine."""
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    request = urllib.request.Request(f"{engine.url}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=30) as stream:
        assert stream.readline().startswith(b"data: ")
        engine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _status(f"{engine.url}/health") == 503, 5, "health says 503")
        status, answer = engine.post("/v1/completions", {"prompt": "late"})
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        rest = stream.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    assert engine.process.wait(10) == 0

"""Engines as servers under the same load: 16 chats at once over HTTP, each engine by itself, taking turns in one run.

    python -m bench.engine_served [--llama VENV] [--vllm VENV] [--threads 2] [--rounds 3] [--chats 16]
                                  [--words 240] [--answer 64] [--pair]

Environments as for `bench.engine_peers`; a peer that is not given is left out. Ours is one engine, exact and with
`--quantization int8`; `--pair` adds a router over one prefill and one decode engine with half of the threads each. All
servers are up all the time, and those that are not asked idle. A round is the same new chats for each server, whoever
was first in one last in the next: streamed, greedy, answers of exactly so many tokens. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch

from bench.chat import Reply, stream_chat, user_message
from bench.engine import DEFAULT_MODEL
from bench.engine_vllm import MAX_MODEL_LEN, environment
from bench.probe import Probe
from bench.stack import provenance, running_stack
from tests.interop.environment import model as vllm_model
from tests.valkey import free_port

START_SECONDS = 600.0
MARGIN = 128
"""Tokens of a chat besides its words and its answer, at most."""


@dataclass(frozen=True)
class Round:
    seconds: float
    replies: list[Reply]

    @property
    def tokens_per_second(self) -> float:
        return sum(reply.output_tokens for reply in self.replies) / self.seconds

    @property
    def ttft(self) -> float:
        return statistics.median(reply.ttft for reply in self.replies)


@contextmanager
def server(command: list[str], port: int, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start a server and wait until it lists its models; yields its base URL, ends it and its children afterwards."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or it would outlive this process
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(env or {})},
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_SECONDS
            while not lists_models(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)}: not ready\n{log.read()[-2000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end(process)


def lists_models(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in children:
        with suppress(psutil.Error):
            child.kill()


@contextmanager
def ours(model: Path, threads: int, *flags: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "backhaul", "engine", "--model", str(model), "--port", str(port)]
    with server([*command, "--threads", str(threads), "--log-level", "error", *flags], port) as url:
        yield url


@contextmanager
def our_pair(model: Path, threads: int) -> Iterator[str]:
    with running_stack("--model", str(model), "--threads", str(max(1, threads // 2))) as facts:
        yield str(facts["base_url"])


@contextmanager
def llama(venv: Path, model: Path, threads: int, chats: int, tokens: int) -> Iterator[str]:
    port = free_port()
    sizes = ["--threads", str(threads), "--parallel", str(chats), "--tokens", str(tokens)]
    command = [str(venv / "bin/python"), "-m", "bench.engine_llama", str(model), "--port", str(port), *sizes]
    with server(command, port, {"OMP_NUM_THREADS": str(threads)}) as url:
        yield url


@contextmanager
def vllm(venv: Path, model: Path, threads: int) -> Iterator[str]:
    port = free_port()
    command = [
        *(str(venv / "bin/vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--disable-uvicorn-access-log"),
        *("--distributed-executor-backend", "uni"),
    ]
    with server(command, port, environment(threads)) as url:
        yield url


async def model_name(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(f"{base_url}/models") as answer:
        return str((await answer.json())["data"][0]["id"])


async def load(base_url: str, bodies: list[dict[str, Any]]) -> Round:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        name = await model_name(session, base_url)
        started = time.perf_counter()
        replies = await asyncio.gather(*(stream_chat(session, base_url, {**body, "model": name}) for body in bodies))
        return Round(time.perf_counter() - started, list(replies))


def chats(chooser: random.Random, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    common = {"max_tokens": arguments.answer, "temperature": 0.0, "ignore_eos": True}
    return [{**common, "messages": [user_message(chooser, arguments.words)]} for _ in range(arguments.chats)]


def start(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, str]:
    """Base URLs by name."""
    model, threads = arguments.model, arguments.threads
    urls = {"ours, exact": stack.enter_context(ours(model, threads))}
    urls["ours, int8"] = stack.enter_context(ours(model, threads, "--quantization", "int8"))
    if arguments.pair:
        urls["ours, prefill and decode engine"] = stack.enter_context(our_pair(model, threads))
    if arguments.llama:
        tokens = arguments.words + arguments.answer + MARGIN
        urls["llama.cpp"] = stack.enter_context(llama(arguments.llama, model, threads, arguments.chats, tokens))
    if arguments.vllm:
        urls["vLLM"] = stack.enter_context(vllm(arguments.vllm, arguments.vllm_model or vllm_model(), threads))
    return urls


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure engines as servers under the same load.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a GGUF file")
    parser.add_argument("--llama", type=Path, help="environment with xllamacpp")
    parser.add_argument("--vllm", type=Path, help="environment with vLLM")
    parser.add_argument("--vllm-model", type=Path, help="the model as a folder; default: made of the small one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=16, help="at once")
    parser.add_argument("--words", type=int, default=240, help="of each prompt, about a token each")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--pair", action="store_true", help="ours as a prefill and a decode engine, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chooser, probe = random.Random(0), Probe()
    with ExitStack() as stack:
        urls = start(stack, arguments)
        rounds: dict[str, list[Round]] = {name: [] for name in urls}
        for url in urls.values():
            asyncio.run(load(url, chats(chooser, arguments)[:1]))
        order = list(urls)
        for _ in range(arguments.rounds):
            bodies = chats(chooser, arguments)
            for name in order:
                probe.sample()
                rounds[name].append(asyncio.run(load(urls[name], bodies)))
            order.append(order.pop(0))
    print(f"{provenance()} · {arguments.threads} threads · {arguments.rounds} rounds, medians")
    prompt = statistics.median(reply.prompt_tokens for reply in rounds[order[0]][0].replies)
    print(f"{arguments.chats} chats at once, prompts of {prompt:.0f} tokens, answers of {arguments.answer}\n")
    report(rounds)
    print(f"\nprobes: {probe.summary()}")


def report(rounds: Mapping[str, list[Round]]) -> None:
    first = next(iter(rounds.values()))
    print("| | seconds to finish | output tok/s | TTFT, median, s | ours, exact, by it |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, found in rounds.items():
        ratio = statistics.median(theirs.seconds / own.seconds for own, theirs in zip(first, found, strict=True))
        figures = (
            f"{statistics.median(one.seconds for one in found):.1f}",
            f"{statistics.median(one.tokens_per_second for one in found):.0f}",
            f"{statistics.median(one.ttft for one in found):.2f}",
            f"{ratio:.2f}x",
        )
        print(f"| {name} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()

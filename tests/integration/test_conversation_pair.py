"""Conversations over a real prefill and decode engine, whose clocks are 2,000 s apart: the KV goes there and back."""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tests.property.launcher as launcher
from tests.integration.engines import Engine, engines, wait_until

BLOCK = 16
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4  # layers, K and V, kv heads, tokens, head dim, float32
COMPLETIONS = "/v1/completions"
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
OFFER_SECONDS = 3.0
LEASE_SECONDS = 2.0
HANDSHAKE_SECONDS = 1.0


def command(model: Path, clock_offset: float, role: str, *flags: str, **settings: Any) -> list[str]:
    extra = {
        "kv_recompute_threshold": 0,
        "decoder_kv_blocks_ttl": OFFER_SECONDS,
        "kv_lease_duration": LEASE_SECONDS,
        "handshake_timeout": HANDSHAKE_SECONDS,
    }
    config = {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra, **settings}
    return [
        *(
            sys.executable,
            str(launcher.__file__),
            str(clock_offset),
            "0",
            "engine",
            "--model",
            str(model),
            "--role",
            role,
        ),
        *("--threads", "1", "--served-model-name", "tiny", "--dtype", "float32", "--log-level", "info"),
        *("--kv-transfer-config", json.dumps(config), *flags),
    ]


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    with engines(
        tmp_path_factory.mktemp("conversations"),
        command(tiny_model, 1000.0, "prefill"),
        command(tiny_model, -1000.0, "decode", "--max-num-seqs", "2"),
        command(tiny_model, 0.0, "both", kv_load_failure_policy="fail"),
    ) as fleet:
        yield fleet
        for engine in fleet:
            assert "Traceback" not in engine.log.read_text()


@pytest.fixture
def prefill(fleet: list[Engine]) -> Engine:
    return fleet[0]


@pytest.fixture
def decode(fleet: list[Engine]) -> Engine:
    return fleet[1]


@pytest.fixture
def strict(fleet: list[Engine]) -> Engine:
    """Fails what it cannot load. Also the reference, for it is either kind of engine, and alone."""
    return fleet[2]


@pytest.fixture(autouse=True)
def nothing_is_left(fleet: list[Engine]) -> Iterator[None]:
    before = [engine.metrics() for engine in fleet]
    yield
    for engine, earlier in zip(fleet, before, strict=True):
        wait_until(lambda engine=engine: held(engine) == 0, 10, f"{engine.url} frees all blocks")  # type: ignore[misc]
        name = "backhaul_engine_unknown_notifications_total"
        assert engine.metrics()[name] == earlier[name], "released what was not held"


def held(engine: Engine) -> float:
    metrics = engine.metrics()
    names = ("backhaul_engine_blocks_pinned", "backhaul_engine_leases_held", "vllm:kv_cache_usage_perc")
    return sum(metrics[name] for name in names)


def grown(before: dict[str, float], after: dict[str, float], name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    names = [n for n in after if n.split("{")[0] == name and "{" in n and all(label in n for label in wanted)]
    return sum(after[n] - before.get(n, 0.0) for n in names)


def good(answer: tuple[int, Any]) -> Any:
    assert answer[0] == 200, answer
    return answer[1]


def leg(engine: Engine, prompt: list[int], params: dict[str, Any] | None = None, **options: Any) -> Any:
    body = {"prompt": prompt, **GREEDY, "max_tokens": 6, **options}
    return good(engine.post(COMPLETIONS, body | ({"kv_transfer_params": params} if params else {})))


def tokens(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def random_prompt(length: int, seed: object) -> list[int]:
    return random.Random(str(seed)).choices(range(300), k=length)


def turn(
    prefill: Engine, decode: Engine, prompt: list[int], offer: dict[str, Any] | None = None, **options: Any
) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """(tokens of the answer, what decode offers, what prefill said), as a router goes about it."""
    held = leg(prefill, prompt, (offer or {}) | HOLD, max_tokens=1)["kv_transfer_params"]
    answer = leg(decode, prompt, held, **options)
    return tokens(answer), answer["kv_transfer_params"], held


def release(owner: Engine, params: dict[str, Any] | None) -> None:
    """As a router does with blocks that nobody will read; their time may be over by then."""
    if params:
        names = {"engine_id": params["remote_engine_id"], "request_id": params["remote_request_id"]}
        assert owner.post("/kv/release", names)[0] == 200


def test_each_turn_pulls_the_last_one_and_equals_a_lone_engine(prefill: Engine, decode: Engine, strict: Engine) -> None:
    prompt, offer, known = random_prompt(37, "dialog"), None, 0
    for number in range(4):
        before, before_d = prefill.metrics(), decode.metrics()
        answer, offer, said = turn(prefill, decode, prompt, offer)
        after = prefill.metrics()
        assert answer == tokens(leg(strict, prompt))
        assert (offer["do_remote_decode"], offer["do_remote_prefill"]) == (True, False)
        assert offer["remote_num_tokens"] == len(prompt) + len(answer) - 1
        assert len(offer["remote_block_ids"][0]) == -(-offer["remote_num_tokens"] // BLOCK)
        cached, pulled = said["remote_prefill_cached_tokens"], said["remote_prefill_pulled_tokens"]
        assert cached + pulled == known, "all that anybody had computed"
        assert grown(before, after, "vllm:prompt_tokens_by_source_total", source="local_compute") == len(prompt) - known
        assert grown(before, after, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == pulled
        assert (pulled > 0) == (number > 0)
        num_new = -(-len(prompt) // BLOCK) - known // BLOCK
        assert grown(before_d, decode.metrics(), "vllm:nixl_bytes_transferred_sum") == num_new * BLOCK_BYTES
        known = offer["remote_num_tokens"]
        prompt = [*prompt, *answer, *random_prompt(11, number)]
    release(decode, offer)


def test_offer_says_how_long_it_stands_and_ends_then(prefill: Engine, decode: Engine, strict: Engine) -> None:
    """The deadline in the params is of a clock 2,000 s behind the reader's: the owner alone can tell."""
    for wait in (0.0, OFFER_SECONDS + 0.1):
        prompt = random_prompt(40, wait)
        before, before_d = prefill.metrics(), decode.metrics()
        answer, offer, _ = turn(prefill, decode, prompt)
        assert offer["remote_blocks_ttl"] == OFFER_SECONDS
        time.sleep(wait)  # there is nothing else to wait for: the lease ends by the engine's own clock
        longer = [*prompt, *answer, 1, 2, 3]
        second, third, said = turn(prefill, decode, longer, offer)
        assert second == tokens(leg(strict, longer))
        after, after_d = prefill.metrics(), decode.metrics()
        refused = grown(before_d, after_d, "backhaul_engine_claims_refused_total", reason="expired")
        failed = grown(before, after, "backhaul_engine_kv_pulls_failed_total", reason="claim")
        assert (refused, failed) == ((1, 1) if wait else (0, 0))
        assert (said["remote_prefill_pulled_tokens"] > 0) == (wait == 0)
        assert grown(before_d, after_d, "vllm:nixl_num_kv_expired_reqs_total") == (1 if wait else 0)
        release(decode, third)


@contextmanager
def server_that(answers: bytes | None) -> Iterator[int]:
    """The port of something that takes connections and says this, or nothing."""
    connections = []

    def serve() -> None:
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            connections.append(connection)
            if answers is not None:
                connection.sendall(answers)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("kind", ["closed", "silent", "garbage"])
@pytest.mark.parametrize("direction", ["to decode", "to prefill"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_owner_that_cannot_be_reached_costs_that_request_only(
    fleet: list[Engine], kind: str, direction: str, policy: str
) -> None:
    prefill, decode, strict = fleet
    prompt = random_prompt(50, kind + direction + policy)
    if direction == "to decode":
        owner, reader = prefill, decode
        params = leg(prefill, prompt, HOLD, max_tokens=1)["kv_transfer_params"]
    else:
        owner, reader = decode, prefill
        answer, offer, _ = turn(prefill, decode, prompt)
        prompt, params = [*random_prompt(5, "before"), *prompt, *answer], offer | HOLD
        # Cut at the front, so that the reader's cache has nothing; the hashes are left out, so that it tries to read.
        params.pop("remote_block_hashes")
    reader = strict if policy == "fail" else reader
    beside, others = random_prompt(20, "beside"), []
    thread = threading.Thread(target=lambda: others.append(tokens(leg(reader, beside, max_tokens=200))))
    thread.start()
    with server_that(b"\x00garbage\r\n\r\n" if kind == "garbage" else None) as port:
        wrong = params | {"remote_port": 1 if kind == "closed" else port}
        before, started = reader.metrics(), time.monotonic()
        body = {"prompt": prompt, **GREEDY, "max_tokens": 6, "kv_transfer_params": wrong}
        status, answer = reader.post(COMPLETIONS, body)
        assert time.monotonic() - started < HANDSHAKE_SECONDS + 5.0
    thread.join(30)
    assert grown(before, reader.metrics(), "backhaul_engine_handshake_failures_total", reason="handshake") == 1
    assert others == [tokens(leg(strict, beside, max_tokens=200))]
    if policy == "fail":
        assert status == 500
        assert "could not be loaded (handshake)" in answer["error"]["message"]
    else:
        assert (status, tokens(answer)) == (200, tokens(leg(strict, prompt)))
        release(reader, answer.get("kv_transfer_params"))
    release(owner, params)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_engine_of_another_name_at_the_address_is_not_read_and_counted(
    prefill: Engine, decode: Engine, strict: Engine, policy: str
) -> None:
    """As when two engines advertise the same address: the one that answers is not the one that holds the blocks."""
    reader = strict if policy == "fail" else decode
    prompt = random_prompt(40, policy)
    params = leg(prefill, prompt, HOLD, max_tokens=1)["kv_transfer_params"]
    before = reader.metrics()
    body = {"prompt": prompt, **GREEDY, "max_tokens": 6}
    status, answer = reader.post(
        COMPLETIONS, body | {"kv_transfer_params": params | {"remote_engine_id": "somebody-else"}}
    )
    assert status == (500 if policy == "fail" else 200)
    if policy == "recompute":
        assert tokens(answer) == tokens(leg(strict, prompt))
    after = reader.metrics()
    assert grown(before, after, "backhaul_engine_handshake_failures_total", reason="engine_id") == 1
    assert grown(before, after, "vllm:nixl_bytes_transferred_sum") == 0
    release(prefill, params)


def test_lease_lives_while_its_reader_queues_for_longer(prefill: Engine, decode: Engine, strict: Engine) -> None:
    """Decode is busy for several lease times; its heartbeats keep the blocks, and nothing is computed twice."""
    prompt = random_prompt(60, "queue")
    before, before_p = decode.metrics(), prefill.metrics()
    with busy(decode):
        held = leg(prefill, prompt, HOLD, max_tokens=1)["kv_transfer_params"]
        answers: list[list[int]] = []
        thread = threading.Thread(target=lambda: answers.append(tokens(leg(decode, prompt, held))))
        thread.start()
        until = time.monotonic() + 3 * LEASE_SECONDS
        wait_until(lambda: time.monotonic() > until, 4 * LEASE_SECONDS, "three lease times have passed")
        assert not answers, "else this shows nothing: decode was not busy for long enough"
        assert prefill.metrics()["backhaul_engine_leases_held"] == 1
    thread.join(30)
    assert answers == [tokens(leg(strict, prompt))]
    after = decode.metrics()
    assert grown(before, after, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == len(prompt) - 1
    assert grown(before_p, prefill.metrics(), "vllm:nixl_num_kv_expired_reqs_total") == 0


@contextmanager
def busy(engine: Engine, num_streams: int = 12) -> Iterator[None]:
    """Long answers, most of them queued behind others, whose clients leave at the end."""
    address = urlsplit(engine.url)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4_000, "ignore_eos": True, "stream": True})
    with ExitStack() as stack:
        for _ in range(num_streams):
            client = HTTPConnection(address.hostname or "", address.port)
            stack.callback(client.close)
            client.request("POST", COMPLETIONS, body)
        queued = "vllm:num_requests_waiting"
        wait_until(lambda: engine.metrics()[queued] == num_streams - 2, 10, "the engine is busy")
        yield

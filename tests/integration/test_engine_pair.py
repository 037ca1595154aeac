"""A prefill and a decode engine as real processes, joined by NIXL; the test does by hand what the router does."""

from __future__ import annotations

import json
import random
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines import Engine, engine_command, engines, wait_until

BLOCK = 16
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4  # layers, K and V, kv heads, tokens, head dim, float32
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
LEASE = {"kv_connector_extra_config": {"kv_lease_duration": 60}}


@pytest.fixture(scope="module")
def trio(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Prefill, decode, and a lone engine as the reference."""
    command = engine_command(tiny_model, "--served-model-name", "tiny")
    lease = ("--kv-transfer-config", json.dumps(LEASE))
    with engines(
        tmp_path_factory.mktemp("trio"),
        [*command, "--role", "prefill", *lease],
        [*command, "--role", "decode"],
        command,
    ) as trio:
        yield trio
        for engine in trio:
            assert "Traceback" not in engine.log.read_text()


@pytest.fixture
def prefill(trio: list[Engine]) -> Engine:
    return trio[0]


@pytest.fixture
def decode(trio: list[Engine]) -> Engine:
    return trio[1]


@pytest.fixture
def lone(trio: list[Engine]) -> Engine:
    return trio[2]


@pytest.fixture(autouse=True)
def nothing_stays_pinned(trio: list[Engine]) -> Iterator[None]:
    yield
    for engine in trio:
        wait_until(lambda engine=engine: idle(engine), 5, f"no block is pinned on {engine.url}")  # type: ignore[misc]


def idle(engine: Engine) -> bool:
    if engine.process.poll() is not None:
        return True
    metrics = engine.metrics()
    return metrics["backhaul_engine_blocks_pinned"] == metrics["vllm:kv_cache_usage_perc"] == 0


def good(answer: tuple[int, Any]) -> Any:
    assert answer[0] == 200, answer
    return answer[1]


def prefill_leg(engine: Engine, path: str, body: dict[str, Any]) -> Any:
    return good(engine.post(path, body | {"max_tokens": 1, "return_token_ids": True, "kv_transfer_params": HOLD}))


def grown(before: dict[str, float], after: dict[str, float], name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    names = [n for n in after if n.split("{")[0] == name and "{" in n and all(label in n for label in wanted)]
    return sum(after[n] - before.get(n, 0.0) for n in names)


def stream(engine: Engine, path: str, body: dict[str, Any]) -> list[Any]:
    request = urllib.request.Request(engine.url + path, json.dumps(body | {"stream": True}).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        *events, done, end = answer.read().decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 100, 1000])
def test_completion_over_both_equals_a_lone_engine(prefill: Engine, decode: Engine, lone: Engine, length: int) -> None:
    prompt = random.Random(length).choices(range(300), k=length)
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    before = decode.metrics()
    params = prefill_leg(prefill, COMPLETIONS, body)["kv_transfer_params"]
    assert params["remote_num_tokens"] == length
    answer = good(decode.post(COMPLETIONS, body | {"max_tokens": 20, "kv_transfer_params": params}))
    expected = good(lone.post(COMPLETIONS, body | {"max_tokens": 20}))
    assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == params["remote_prefill_cached_tokens"]
    after = decode.metrics()
    num_blocks = -(-length // BLOCK)
    # One token is computed anyway, for its logits, so nothing is pulled for a prompt of one.
    pulled = num_blocks if length > 1 else 0
    assert grown(before, after, "vllm:nixl_bytes_transferred_sum") == pulled * BLOCK_BYTES
    assert grown(before, after, "vllm:nixl_xfer_time_seconds_count") == (1 if pulled else 0)
    computed = grown(before, after, "vllm:prompt_tokens_by_source_total", source="local_compute")
    external = grown(before, after, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert (computed, external) == (1, length - 1)


@pytest.mark.parametrize("streaming", [False, True])
def test_chat_decode_leg_tokenizes_nothing(prefill: Engine, decode: Engine, lone: Engine, streaming: bool) -> None:
    text = f"tell me about the world and what is in it, {streaming}. " * 5
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0}
    before = decode.metrics()
    first = prefill_leg(prefill, CHAT, body)
    params = first["kv_transfer_params"] | {"prompt_token_ids": first["prompt_token_ids"]}
    expected = good(lone.post(CHAT, body | {"max_tokens": 20}))
    whole = body | {"max_tokens": 20, "kv_transfer_params": params}
    if streaming:
        events = stream(decode, CHAT, whole | {"stream_options": {"include_usage": True}})
        content = "".join(c["delta"].get("content", "") for event in events for c in event["choices"])
        usage = events[-1]["usage"]
    else:
        answer = good(decode.post(CHAT, whole))
        content, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    assert content == expected["choices"][0]["message"]["content"]
    assert usage["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    after = decode.metrics()
    assert grown(before, after, "backhaul_engine_tokenizer_calls_total") == 0
    assert grown(before, after, "vllm:prompt_tokens_by_source_total", source="local_compute") == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_ids_of_the_prefill_engine_count_and_not_the_messages_beside_them(
    prefill: Engine, decode: Engine, lone: Engine, streaming: bool
) -> None:
    text = f"tell me about the world and what is in it, once more, {streaming}. " * 5
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 20}
    first = prefill_leg(prefill, CHAT, body)
    expected = good(lone.post(CHAT, body | {"return_token_ids": True}))
    params = first["kv_transfer_params"] | {"prompt_token_ids": first["prompt_token_ids"]}
    other = {"messages": [{"role": "user", "content": "goodbye"}], "kv_transfer_params": params}
    asked = body | other | {"return_token_ids": True}
    events = stream(decode, CHAT, asked) if streaming else [good(decode.post(CHAT, asked))]
    told = [event.get("prompt_token_ids") for event in events]
    assert told == [expected["prompt_token_ids"]] + [None] * (len(events) - 1)
    ids = [token for event in events for token in event["choices"][0].get("token_ids", ())]
    assert ids == expected["choices"][0]["token_ids"]


def test_only_what_decode_lacks_is_pulled(prefill: Engine, decode: Engine) -> None:
    prompt = [(3 * index + 11) % 300 for index in range(200)]
    body = {"temperature": 0, "ignore_eos": True}
    for length, num_pulled in ((96, 6), (200, 7)):
        before = decode.metrics()
        leg = body | {"prompt": prompt[:length]}
        params = prefill_leg(prefill, COMPLETIONS, leg)["kv_transfer_params"]
        good(decode.post(COMPLETIONS, leg | {"max_tokens": 2, "kv_transfer_params": params}))
        after = decode.metrics()
        assert grown(before, after, "vllm:nixl_bytes_transferred_sum") == num_pulled * BLOCK_BYTES


def test_first_token_that_ends_the_text_still_hands_over(prefill: Engine, decode: Engine) -> None:
    body = {"prompt": "hello", "temperature": 0, "logit_bias": {"319": 100.0}}
    first = prefill_leg(prefill, COMPLETIONS, body)
    assert first["choices"][0]["finish_reason"] == "stop"
    params = first["kv_transfer_params"]
    answer = good(decode.post(COMPLETIONS, body | {"max_tokens": 5, "kv_transfer_params": params}))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"temperature": -1}, 400),
        ({"model": "nobody"}, 404),
        ({"prompt": [1] * 5000}, 400),
        ({"prompt": {}}, 400),
        ({"n": 0}, 400),
    ],
)
def test_refused_decode_leg_frees_the_prefill_engine(
    prefill: Engine, decode: Engine, change: dict[str, Any], status: int
) -> None:
    body = {"prompt": "hello world, hello world"}
    params = prefill_leg(prefill, COMPLETIONS, body)["kv_transfer_params"]
    assert prefill.metrics()["backhaul_engine_blocks_pinned"] > 0
    assert decode.post(COMPLETIONS, body | {"kv_transfer_params": params} | change)[0] == status
    wait_until(lambda: prefill.metrics()["backhaul_engine_blocks_pinned"] == 0, 2, "the blocks are released")


def test_blocks_of_another_prompt_are_not_used(prefill: Engine, decode: Engine, lone: Engine) -> None:
    """The hashes in the params are those of another text: the answer must be computed, and the blocks released."""
    params = prefill_leg(prefill, COMPLETIONS, {"prompt": [5] * 40})["kv_transfer_params"]
    body = {"prompt": [6] * 40, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    answer = good(decode.post(COMPLETIONS, body | {"kv_transfer_params": params}))
    expected = good(lone.post(COMPLETIONS, body))
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]


@pytest.mark.parametrize(
    "forgery", ["hashes left out", "hashes of another", "blocks of another", "reversed", "repeated"]
)
def test_forged_params_neither_change_an_answer_nor_poison_the_next(
    prefill: Engine, decode: Engine, lone: Engine, forgery: str
) -> None:
    """Params as a client of the decode engine's own port may make them up, of those for two prompts of its own."""
    rng = random.Random(forgery)
    victim, prompt = rng.choices(range(300), k=4 * BLOCK), rng.choices(range(300), k=4 * BLOCK)
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    held, other = (
        prefill_leg(prefill, COMPLETIONS, body | {"prompt": each})["kv_transfer_params"] for each in (victim, prompt)
    )
    (blocks,) = held["remote_block_ids"]
    forged, target = {
        "hashes left out": ({key: held[key] for key in held if key != "remote_block_hashes"}, prompt),
        "hashes of another": (held | {"remote_block_hashes": other["remote_block_hashes"]}, prompt),
        "blocks of another": (other | {"remote_block_ids": [blocks]}, prompt),
        "reversed": (held | {"remote_block_ids": [blocks[::-1]]}, victim),
        "repeated": (held | {"remote_block_ids": [blocks[:1] * len(blocks)]}, victim),
    }[forgery]

    def tokens(engine: Engine, ids: list[int], **options: Any) -> Any:
        return good(engine.post(COMPLETIONS, body | {"prompt": ids, "max_tokens": 12} | options))["choices"][0][
            "token_ids"
        ]

    before = decode.metrics()
    assert tokens(decode, target, kv_transfer_params=forged) == tokens(lone, target)
    assert grown(before, decode.metrics(), "vllm:nixl_bytes_transferred_sum") == 0
    # The lease that was not touched is good; then the prefix cache answers; then a longer prompt over both.
    rest, params = (victim, held) if forged["remote_request_id"] == other["remote_request_id"] else (prompt, other)
    assert tokens(decode, rest, kv_transfer_params=params) == tokens(lone, rest)
    for ids in ([*victim, 7, 8], [*prompt, 7, 8]):
        assert tokens(decode, ids) == tokens(lone, ids)
        longer = [*ids, 9]
        leg = prefill_leg(prefill, COMPLETIONS, body | {"prompt": longer})["kv_transfer_params"]
        assert tokens(decode, longer, kv_transfer_params=leg) == tokens(lone, longer)


def test_dead_address_costs_a_recompute(prefill: Engine, decode: Engine, lone: Engine) -> None:
    body = {"prompt": [9] * 50, "temperature": 0, "ignore_eos": True}
    params = prefill_leg(prefill, COMPLETIONS, body)["kv_transfer_params"]
    before = decode.metrics()
    wrong = params | {"remote_port": 1}
    answer = good(decode.post(COMPLETIONS, body | {"max_tokens": 8, "kv_transfer_params": wrong}))
    expected = good(lone.post(COMPLETIONS, body | {"max_tokens": 8}))
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    after = decode.metrics()
    assert grown(before, after, "vllm:nixl_num_failed_transfers_total") == 1
    assert grown(before, after, "backhaul_engine_kv_pulls_failed_total", reason="handshake") == 1
    names = {"engine_id": params["remote_engine_id"], "request_id": params["remote_request_id"]}
    assert prefill.post("/kv/release", names) == (200, {"released": True})


def test_agent_route_names_the_engine_of_the_params(prefill: Engine) -> None:
    params = prefill_leg(prefill, COMPLETIONS, {"prompt": "x"})["kv_transfer_params"]
    with urllib.request.urlopen(f"{prefill.url}/kv/agent", timeout=5) as answer:
        agent = json.load(answer)
    assert agent["engine_id"] == params["remote_engine_id"]
    assert agent["kv_layout"] == params["kv_layout"]
    assert agent["block_bytes"] == BLOCK_BYTES
    names = {"engine_id": params["remote_engine_id"], "request_id": params["remote_request_id"]}
    assert prefill.post("/kv/release", names) == (200, {"released": True})


def test_draining_prefill_engine_lets_its_blocks_be_read(prefill: Engine, decode: Engine, lone: Engine) -> None:
    """Last, for it ends the prefill engine."""
    body = {"prompt": [8] * 70, "temperature": 0, "ignore_eos": True}
    params = prefill_leg(prefill, COMPLETIONS, body)["kv_transfer_params"]
    before = decode.metrics()
    prefill.process.send_signal(signal.SIGTERM)
    wait_until(lambda: prefill.post(COMPLETIONS, body)[0] == 503, 5, "it drains")
    answer = good(decode.post(COMPLETIONS, body | {"max_tokens": 6, "kv_transfer_params": params}))
    expected = good(lone.post(COMPLETIONS, body | {"max_tokens": 6}))
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert grown(before, decode.metrics(), "vllm:nixl_bytes_transferred_sum") == 5 * BLOCK_BYTES
    assert prefill.process.wait(10) == 0

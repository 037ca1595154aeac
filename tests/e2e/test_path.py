"""Counters prove which way the tokens went: nothing is prefilled twice, tokenized twice, or left pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.support import Stack, post, post_raw, read_metrics, wait_until

pytestmark = pytest.mark.model

BLOCK = 16
BLOCK_BYTES = 30 * 2 * 3 * BLOCK * 64 * 4  # layers, K and V, kv heads, tokens, head dim, float32


def settle(stack: Stack) -> None:
    for engine in stack.engines:
        wait_until(
            lambda engine=engine: engine.metrics()["backhaul_engine_blocks_pinned"] == 0,  # type: ignore[misc]
            5,
            f"no block pinned on the {engine.role} engine",
        )


def grown(before: dict[str, float], after: dict[str, float], prefix: str) -> float:
    """How much the samples of a metric (`name{`) went up."""
    names = [name for name in after if name.startswith(prefix)]
    assert names, f"no metric {prefix}"
    return sum(after[name] - before.get(name, 0.0) for name in names)


def chat(stack: Stack, text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}


def completions(stack: Stack, text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": 4, "temperature": 0}


def responses(stack: Stack, text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": text, "max_output_tokens": 4, "temperature": 0}


def generate(stack: Stack, text: str) -> tuple[str, dict[str, Any]]:
    ids = post(f"{stack.router}/tokenize", {"model": stack.model, "prompt": text})["tokens"]
    return "/inference/v1/generate", {"token_ids": ids, "sampling_params": {"max_tokens": 4, "temperature": 0}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [1, 30, 300])
@pytest.mark.parametrize("door", [chat, completions, responses, generate])
def test_decode_engine_computes_one_block_and_never_tokenizes(
    stack: Stack, door: Callable[[Stack, str], tuple[str, dict[str, Any]]], words: int, stream: bool
) -> None:
    path, body = door(stack, f"Remember {words} {stream} {door.__name__}: " + "apple river " * words)
    before = stack.decode.metrics()
    router_before = read_metrics(f"{stack.router}/metrics")
    body |= {"model": stack.model, "stream": stream}
    data = post_raw(f"{stack.router}{path}", body)
    assert b'"error":{' not in data
    settle(stack)
    after, router_after = stack.decode.metrics(), read_metrics(f"{stack.router}/metrics")
    prompt_tokens = grown(router_before, router_after, 'backhaul_router_tokens_total{kind="prompt"')
    by_source = {
        source: grown_by_source(before, after, source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sum(by_source.values()) == prompt_tokens > words
    assert by_source["local_compute"] <= BLOCK
    assert by_source["external_kv_transfer"] > 0
    assert grown(before, after, "backhaul_engine_tokenizer_calls_total{") == 0
    moved = grown(before, after, "vllm:nixl_bytes_transferred_sum{")
    hit_blocks = by_source["local_cache_hit"] // BLOCK
    assert moved == (-(-prompt_tokens // BLOCK) - hit_blocks) * BLOCK_BYTES


def grown_by_source(before: dict[str, float], after: dict[str, float], source: str) -> float:
    names = [name for name in after if f'source="{source}"' in name]
    assert names, f"no counter for {source}"
    return sum(after[name] - before.get(name, 0.0) for name in names)


def test_second_turn_reuses_what_prefill_holds(stack: Stack) -> None:
    messages = [{"role": "user", "content": "Tell me about canals. " * 20}]
    body = {"model": stack.model, "max_tokens": 8, "temperature": 0}
    first = post(f"{stack.base_url}/chat/completions", {**body, "messages": messages})
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And about locks?"}]
    messages[1] = {"role": "assistant", "content": messages[1]["content"]}
    second = post(f"{stack.base_url}/chat/completions", {**body, "messages": messages})
    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - BLOCK <= reused < second["usage"]["prompt_tokens"]
    settle(stack)


def test_turn_is_remembered_in_the_store(stack: Stack) -> None:
    import redis

    store = redis.Redis.from_url(stack.store)
    headers = {"X-Conversation-Id": "the-path-test"}
    body = {"model": stack.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    before = set(store.keys("*"))
    post(f"{stack.base_url}/chat/completions", body, headers)
    wait_until(lambda: set(store.keys("*")) > before, 5, "a record of the conversation")
    new = set(store.keys("*")) - before
    assert all(store.ttl(key) > 0 for key in new), "every key expires"
    store.close()


def test_router_counts_the_turn(stack: Stack) -> None:
    before = read_metrics(f"{stack.router}/metrics")
    body = {"model": stack.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    post(f"{stack.base_url}/chat/completions", body)
    after = read_metrics(f"{stack.router}/metrics")
    assert grown(before, after, "backhaul_router_turns_total{") == 1


def test_prefill_makes_one_token_whatever_the_answers_length_is_called(stack: Stack) -> None:
    """Under any name: a prefill engine that answers in full keeps its clients waiting for what nobody reads."""
    before = stack.prefill.metrics()
    messages = [{"role": "user", "content": "Count to a hundred."}]
    body = {"model": stack.model, "messages": messages, "max_completion_tokens": 60, "ignore_eos": True}
    answer = post(f"{stack.base_url}/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 60
    after = stack.prefill.metrics()
    assert grown(before, after, "vllm:generation_tokens_total{") == 1

"""Counters prove which way the tokens went: nothing is prefilled twice, tokenized twice, or left pinned."""

from __future__ import annotations

import pytest

from tests.e2e.support import Stack, post, read_metrics, wait_until

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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [1, 30, 300])
def test_decode_engine_computes_one_token_and_never_tokenizes(stack: Stack, words: int, stream: bool) -> None:
    before = stack.decode.metrics()
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": f"Remember {words} {stream}: " + "apple river " * words}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        prompt_tokens = _stream_usage(stack, body)
    else:
        prompt_tokens = post(f"{stack.base_url}/chat/completions", body)["usage"]["prompt_tokens"]
    settle(stack)
    after = stack.decode.metrics()
    by_source = {
        source: grown_by_source(before, after, source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sum(by_source.values()) == prompt_tokens
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


def _stream_usage(stack: Stack, body: dict[str, object]) -> int:
    from openai import OpenAI

    client = OpenAI(base_url=stack.base_url, api_key="none")
    usage = None
    for chunk in client.chat.completions.create(**body, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        usage = chunk.usage or usage
    assert usage is not None
    return int(usage.prompt_tokens)


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

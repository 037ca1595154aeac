"""The decode engine's round trip for one prompt, asked through each endpoint.

    python -m bench.turn --doors 40     (or python -m bench.doors --prompts 40)

Every prompt is asked once through each of the four endpoints, each time under a new `cache_salt`, so that none finds
what another left; the order changes from prompt to prompt. The round trip is that of the decode leg as the router
measures it (`backhaul_router_leg_seconds`), from sending it to the end of the answer. Ratios are medians over the
prompts of the endpoint's time by the chat's for the same prompt. Also: prompt tokens that decode computed, at most one
block each, and that its tokenizer was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from bench.chat import ANSWER_TIMEOUT, BY_SOURCE, percentile, scrape, user_message
from bench.stack import provenance, running_stack

WORDS: Final = 250
ANSWER: Final = 16
LEG: Final = "backhaul_router_leg_seconds_sum:decode"
COMPUTED: Final = f"{BY_SOURCE}:local_compute"
TOKENIZED: Final = "backhaul_engine_tokenizer_calls_total"


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    """The decode leg's."""
    computed: int
    tokenized: int


def bodies(prompt: str, ids: Sequence[int], salt: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body by endpoint: the same prompt, the same greedy answer of the same length."""
    common = {"cache_salt": salt, "stream": True}
    sampling = {"max_tokens": ANSWER, "min_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": prompt}]
    responses = {"max_output_tokens": ANSWER, "temperature": 0, "min_tokens": ANSWER, "ignore_eos": True}
    return {
        "chat": ("/v1/chat/completions", {"messages": messages, **sampling, **common}),
        "completions": ("/v1/completions", {"prompt": list(ids), **sampling, **common}),
        "responses": ("/v1/responses", {"input": prompt, **responses, **common}),
        "generate": ("/inference/v1/generate", {"token_ids": list(ids), "sampling_params": sampling, **common}),
    }


async def measure(
    session: aiohttp.ClientSession, facts: Mapping[str, Any], num_prompts: int
) -> dict[str, list[Sample]]:
    router, model = facts["router"]["url"], facts["model"]
    [decode] = [engine["url"] for engine in facts["engines"] if engine["role"] == "decode"]
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for number in range(-1, num_prompts):  # the first is for connections and handshakes, and not counted
        prompt = str(user_message(random.Random(number), WORDS)["content"])
        ids = await tokenize(session, router, model, prompt)
        asked = list(bodies(prompt, ids, "").items())
        first = number % len(asked)
        for name, _ in asked[first:] + asked[:first]:
            path, body = bodies(prompt, ids, f"{number}-{name}")[name]
            before = [await scrape(session, url) for url in (router, decode)]
            await post(session, router + path, {"model": model, **body})
            after = [await scrape(session, url) for url in (router, decode)]
            sample = Sample(
                after[0][LEG] - before[0][LEG],
                int(after[1][COMPUTED] - before[1][COMPUTED]),
                int(after[1][TOKENIZED] - before[1][TOKENIZED]),
            )
            if number >= 0:
                samples[name].append(sample)
    return samples


async def tokenize(session: aiohttp.ClientSession, router: str, model: str, prompt: str) -> list[int]:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    return list(orjson.loads(await post(session, f"{router}/tokenize", body))["tokens"])


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> bytes:
    """The whole answer. Raises RuntimeError if it is an error."""
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=orjson.dumps(body), headers=headers, timeout=ANSWER_TIMEOUT) as response:
        answer = await response.read()
        if response.status != 200 or b'"error":{' in answer:
            raise RuntimeError(f"{url} answered {response.status}: {answer[:500]!r}")
        return answer


def report(samples: Mapping[str, Sequence[Sample]]) -> None:
    chat = [sample.seconds for sample in samples["chat"]]
    print(
        f"\nDecode's round trip for one prompt of about {WORDS} tokens, {ANSWER} tokens of answer, {len(chat)} prompts"
    )
    print(f"{'endpoint':12} {'median ms':>10} {'p90 ms':>8} {'by chat':>8} {'computed':>9} {'tokenized':>10}")
    for name, found in samples.items():
        seconds = [sample.seconds for sample in found]
        ratio = statistics.median(own / other for own, other in zip(seconds, chat, strict=True))
        median, p90 = 1000 * statistics.median(seconds), 1000 * percentile(seconds, 0.9)
        computed, tokenized = max(sample.computed for sample in found), sum(sample.tokenized for sample in found)
        print(f"{name:12} {median:10.1f} {p90:8.1f} {ratio:8.3f} {computed:9} {tokenized:10}")
    print("computed: prompt tokens that decode computed at most; tokenized: texts it tokenized in all")
    print(provenance())


async def run(facts: Mapping[str, Any], num_prompts: int) -> None:
    async with aiohttp.ClientSession() as session:
        report(await measure(session, facts, num_prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=40)
    args = parser.parse_args()
    with running_stack() as facts:
        asyncio.run(run(facts, args.prompts))


if __name__ == "__main__":
    main()

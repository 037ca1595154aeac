"""Time to first token, turn by turn, of a growing chat through the whole stack.

    python -m bench.turn [--model PATH] [--turns 5] [--words 150] [--answer 48] [--repeat 3]

Each turn adds a user message of about `--words` words. Beside every turn the same request is sent once more as a
conversation nobody has seen (its first message differs), which is what the turn would cost without any reuse; both
are measured in one run, so the ratio means something on a noisy machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

from bench.stack import provenance, running_stack

WORDS = [
    "harbour",
    "train",
    "copper",
    "timber",
    "letter",
    "sailor",
    "barrel",
    "lamp",
    "captain",
    "book",
    "price",
    "river",
    "winter",
    "summer",
    "apple",
]


def user_message(chooser: random.Random, words: int) -> dict[str, str]:
    return {"role": "user", "content": "Comment on: " + " ".join(chooser.choice(WORDS) for _ in range(words))}


def timed_turn(
    client: OpenAI, model: str, messages: list[dict[str, str]], answer: int
) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first token, the answer, and its usage."""
    started = time.perf_counter()
    first, text, usage = None, "", {}
    stream: Iterator[Any] = client.chat.completions.create(  # type: ignore[call-overload]
        model=model,
        messages=messages,
        max_tokens=answer,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            text += chunk.choices[0].delta.content
        if chunk.usage:
            usage = chunk.usage.model_dump()
    return (first or time.perf_counter()) - started, text, usage


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="GGUF file or HF folder; default: the small model")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    rows: dict[int, list[tuple[float, float, int, int]]] = {}
    with running_stack(*(["--model", args.model] if args.model else [])) as facts:
        client = OpenAI(base_url=facts["base_url"], api_key="none")
        timed_turn(client, facts["model"], [{"role": "user", "content": "Hi"}], 4)  # connections, first touch
        for repeat in range(args.repeat):
            chooser = random.Random(repeat)
            messages = [{"role": "system", "content": f"You are brief. Session {repeat}."}]
            for turn in range(1, args.turns + 1):
                messages.append(user_message(chooser, args.words))
                warm, text, usage = timed_turn(client, facts["model"], messages, args.answer)
                unseen = [{"role": "system", "content": f"Unseen {repeat} {turn}. You are brief."}, *messages[1:]]
                cold, _, _ = timed_turn(client, facts["model"], unseen, 2)
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                rows.setdefault(turn, []).append((warm, cold, usage["prompt_tokens"], cached))
                messages.append({"role": "assistant", "content": text})

    print(f"TTFT per turn, {facts['model']}, one prefill and one decode engine on this machine")
    print(provenance())
    print(f"{'turn':>4} {'prompt':>7} {'reused':>7} {'TTFT ms':>8} {'cold ms':>8} {'cold/TTFT':>9}")
    for turn, samples in rows.items():
        warm = statistics.median(s[0] for s in samples) * 1e3
        cold = statistics.median(s[1] for s in samples) * 1e3
        prompt, cached = (round(statistics.median(s[i] for s in samples)) for i in (2, 3))
        print(f"{turn:>4} {prompt:>7} {cached:>7} {warm:>8.0f} {cold:>8.0f} {cold / warm:>8.1f}x")


if __name__ == "__main__":
    main()

"""A conversation that has had its first turn: the decode engine holds it, the prefill engine has never seen it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connectors.fake import FakeNetwork
from connectors.wire.transfer import KVTransferParams
from engine.request import Request
from tests.fake_engines import FakeEngine, pair
from tests.fake_runner import expected_output, prompt_of

ASKS = prompt_of(6, 1_000)
"""What the next turn says."""


@dataclass
class Talk:
    p: FakeEngine
    d: FakeEngine
    network: FakeNetwork
    history: list[int]
    """Prompt and answer of the turn."""
    offer: KVTransferParams
    """Of the decode engine: all of the history but its last token, which has no KV yet."""

    @property
    def next_prompt(self) -> list[int]:
        return [*self.history, *ASKS]

    @property
    def num_offered(self) -> int:
        return len(self.history) - 1

    def ask(self, prompt: Sequence[int], offer: KVTransferParams | None = None, **options: Any) -> Request:
        """Queue a prefill leg with the offer, or what a test made of it."""
        params = KVTransferParams.for_prefill(offer or self.offer)
        return self.p.submit(prompt, max_tokens=options.pop("max_tokens", 1), params=params, **options)

    def check_turn(self, request: Request) -> None:
        """The prefill leg has ended well; a decode leg on what it holds gives the right answer."""
        prompt = request.prompt_token_ids
        assert self.p.answer(request) == expected_output(prompt, max_tokens=request.sampling.max_tokens)
        answer, _ = self.d.decode(prompt, self.p.said(request).for_decode(), max_tokens=5)
        assert answer == expected_output(prompt, max_tokens=5)


def after_one_turn(
    num_prompt: int = 10,
    num_answer: int = 5,
    *,
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
    seed: int = 0,
) -> Talk:
    p, d, network = pair(prefill=prefill, decode=decode)
    return Talk(p, d, network, *one_turn(d, num_prompt, num_answer, seed=seed))


def one_turn(d: FakeEngine, num_prompt: int, num_answer: int, *, seed: int) -> tuple[list[int], KVTransferParams]:
    """(prompt and answer, the offer) of a turn that the decode engine did by itself."""
    prompt = prompt_of(num_prompt, seed)
    answer, offer = d.decode(prompt, KVTransferParams.for_decode_alone(), max_tokens=num_answer)
    return [*prompt, *answer], offer

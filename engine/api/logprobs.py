"""Logprobs as the endpoints write them: by token, by id, in lists, and those of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.logprobs import TokenLogprobs
from engine.tokenizer import Tokenizer

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON lacks."""


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def logprob_json(item: TokenLogprobs, *, tokenizer: Tokenizer, count: int, as_id: bool = False) -> Json:
    """Of one token, as chats and responses have it, with the `count` likeliest in its place. `as_id`: tokens are
    written as `token_id:123`."""

    def one(token_id: int, logprob: float) -> Json:
        token = tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if as_id else token.decode(errors="replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(token)}

    return one(item.token_id, item.logprob) | {"top_logprobs": [one(*other) for other in item.top[:count]]}


def logprobs_by_id(items: Iterable[TokenLogprobs]) -> Json:
    content = []
    for item in items:
        top = [
            {"token_id": token_id, "logprob": finite(logprob), "rank": rank}
            for rank, (token_id, logprob) in enumerate(item.top, start=1)
        ]
        told = {"token_id": item.token_id, "logprob": finite(item.logprob), "rank": item.rank, "top_logprobs": top}
        content.append(told)
    return {"content": content}


def prompt_logprobs_json(items: Iterable[TokenLogprobs | None], tokenizer: Tokenizer, count: int) -> list[Json | None]:
    """For each token of a prompt, by id, itself and the `count` likeliest in its place; None for the first."""

    def one(item: TokenLogprobs) -> Json:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(item.top[:count], start=1)]
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_str(token_id),
            }
            for token_id, logprob, rank in ((item.token_id, item.logprob, item.rank), *ranked)
        }

    return [None if item is None else one(item) for item in items]


class TextLogprobs:
    """Of one choice, in four lists as completions have them; what is told later goes on from its text offset."""

    def __init__(self, tokenizer: Tokenizer, count: int, *, as_ids: bool) -> None:
        """`count` alternatives are told beside each token; `as_ids`: tokens are written as `token_id:123`."""
        self._tokenizer = tokenizer
        self._count = count
        self._as_ids = as_ids
        self._offset = 0

    def of_prompt(self, token_ids: Sequence[int], items: Sequence[TokenLogprobs | None]) -> Json:
        return self._lists(zip(token_ids, items, strict=True))

    def of_output(self, items: Iterable[TokenLogprobs]) -> Json:
        return self._lists((item.token_id, item) for item in items)

    def _lists(self, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> Json:
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, item in tokens:
            told["tokens"].append(self._name(token_id))
            told["token_logprobs"].append(None if item is None else finite(item.logprob))
            told["top_logprobs"].append(None if item is None else self._top(item))
            told["text_offset"].append(self._offset)
            self._offset += len(self._tokenizer.token_str(token_id))
        return told

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        """The token itself is always among them; of several with the same text, the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, logprob in ((item.token_id, item.logprob), *item.top[: self._count]):
            name = self._name(token_id)
            top[name] = max(finite(logprob), top.get(name, LEAST_LOGPROB))
        return top

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_str(token_id)

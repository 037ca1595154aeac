"""One answer read token by token: what the model's format makes of it, as output items.

Token by token even where many come at once, so that items, their order and what is counted follow from the tokens
alone: a stream's last event says what an answer in one piece would have said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from engine.api.responses_items import Items, Json, joined
from engine.formats.base import Parser, Piece


class ResponseOutput:
    def __init__(self, parser: Parser, token_bytes: Callable[[int], bytes], *, parallel: bool) -> None:
        self._parser = parser
        self._token_bytes = token_bytes
        self._parallel = parallel
        """Whether there may be more than one call; a model that makes more is not heard."""
        self._items = Items()
        self._pending: list[tuple[int, Json | None]] = []
        """Tokens, with their logprobs if asked for, that nothing has come of yet."""
        self.num_reasoning_tokens = 0

    @property
    def items(self) -> list[Json]:
        return self._items.to_json()

    def push(
        self, texts: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[Json], *, hide_last: bool = False
    ) -> list[Json]:
        """The next tokens, and what each released; there may be more texts. `hide_last`: the last is a stop token."""
        events: list[Json] = []
        for index, (text, token_id, logprob) in enumerate(zip_longest(texts, token_ids, logprobs)):
            given = [] if token_id is None else [token_id]
            if given and not (hide_last and index == len(token_ids) - 1):
                self._pending.append((token_id, logprob))
            events += self._take(self._parser.push(text or "", given))
        return joined(events)

    def end(self, status: str) -> list[Json]:
        return joined(self._take(self._parser.end()) + self._items.end(status))

    def _take(self, piece: Piece) -> list[Json]:
        """A piece with several things in it ends a call first, and begins others last."""
        calls = [call for call in piece.calls if self._parallel or call.index == 0]
        num_begun = sum(call.index != self._items.call_index for call in calls)
        going_on, begun = calls[: len(calls) - num_begun], calls[len(calls) - num_begun :]
        events = [event for call in going_on for event in self._items.call(call)]
        if piece.reasoning:
            self.num_reasoning_tokens += len(self._tokens_of(piece.reasoning))
            events += self._items.think(piece.reasoning)
        if piece.content:
            tokens = self._tokens_of(piece.content)
            events += self._items.say(piece.content, [logprob for _, logprob in tokens if logprob is not None])
        events += [event for call in begun for event in self._items.call(call)]
        if piece.calls:
            self._pending = []
        return events

    def _tokens_of(self, text: str) -> list[tuple[int, Json | None]]:
        """The tokens a piece has come of: of those nothing has come of, as many of the last as it takes to spell it.
        What came before them were marks, which tell one kind from another."""
        pending, self._pending = self._pending, []
        start, missing = len(pending), len(text.encode(errors="surrogatepass"))
        while start and missing > 0:
            start -= 1
            missing -= len(self._token_bytes(pending[start][0]))
        return pending[start:]

"""From sampled tokens to text: incremental detokenisation and stop strings, the same for streams and answers.

Stop strings are matched character by character (Knuth, Morris and Pratt's automaton), so the result does not
depend on how text falls into tokens: the match that *ends* first wins, of those the longest. Text that may still
turn out to be the beginning of a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.detokenizer import IncrementalDecoder
from engine.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What a few more tokens add to the answer."""

    texts: Sequence[str]
    """What each token released, in order; what the end of the answer released comes after all of them."""
    token_ids: list[int]
    """The tokens that count: with a stop string, those up to the one that completed it."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of token_ids, if asked for."""
    stop_string: str | None = None
    """The stop string that ended the answer."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class OutputText:
    """The text of one choice as its tokens come in."""

    def __init__(
        self, decoder: IncrementalDecoder, *, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._matchers = [_Matcher(string) for string in stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        """Decoded but not given out: the beginning of a stop string, perhaps."""
        self.num_tokens = 0
        """Output tokens that count so far."""
        self.ended = False
        """A stop string was found, or the last token was pushed; later tokens do not count."""

    def push(self, token_ids: Sequence[int], *, last: bool = False, hide_last: bool = False) -> Delta:
        """Add tokens. `last`: none will follow. `hide_last`: the final one is a stop token, counted but not shown."""
        if self.ended:
            return Delta((), [])
        shown: list[str] = []
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if hide_last and position == len(token_ids) - 1:
                shown.append("")
            elif (stop := self._add(self._decoder.step([token_id]), shown)) is not None:
                self.ended = True
                return Delta(shown, list(token_ids[: position + 1]), stop_string=stop)
        stop = None
        if last:
            self.ended = True
            stop = self._add(self._decoder.flush(), shown)
            if stop is None:
                shown.append(self._held)
        return Delta(shown, list(token_ids), stop_string=stop)

    def _add(self, text: str, shown: list[str]) -> str | None:
        """Add what is safe of `text` to `shown`, as one entry; returns the stop string it completes, if any."""
        if not self._matchers:
            shown.append(text)
            return None
        armed = self.num_tokens > self._min_tokens
        for index, character in enumerate(text):
            found = [m for m in self._matchers if m.step(character)]
            if found and armed:
                stop = max((m.string for m in found), key=len)
                read = self._held + text[: index + 1]
                shown.append(read if self._include_stop else read[: -len(stop)])
                return stop
        read = self._held + text
        keep = 0 if self._include_stop else max(m.length for m in self._matchers)
        shown.append(read[: len(read) - keep])
        self._held = read[len(read) - keep :]
        return None


class _Matcher:
    """How much of one string the text read so far ends with; a whole match counts once and goes on."""

    def __init__(self, string: str) -> None:
        assert string, "a stop string cannot be empty"
        self.string = string
        self.length = 0
        self._fallback = _fallback_table(string)

    def step(self, character: str) -> bool:
        """Read one character; True if it completes the string."""
        string, fallback, length = self.string, self._fallback, self.length
        while length and string[length] != character:
            length = fallback[length - 1]
        if string[length] == character:
            length += 1
        complete = length == len(string)
        self.length = fallback[length - 1] if complete else length
        return complete


def _fallback_table(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = table[length - 1]
        if string[index] == string[length]:
            length += 1
        table[index] = length
    return table

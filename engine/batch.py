"""What one engine step computes, as the scheduler hands it to the runner, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.logprobs import TokenLogprobs
from engine.media.item import MediaItem
from engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The tokens [num_computed, num_computed + num_tokens) of a request; its block_ids cover them."""

    request: Request
    num_computed: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """True if this step reaches the request's last known token, so that the next one is sampled."""
        return self.num_computed + self.num_tokens == self.request.num_tokens

    @property
    def num_prompt_logprobs(self) -> int:
        """The first so many of its tokens are followed by one of the prompt whose logprob is wanted."""
        if not self.request.wants_prompt_logprobs:
            return 0
        end = min(self.num_computed + self.num_tokens, self.request.num_prompt_tokens - 1)
        return max(0, end - self.num_computed)


@dataclass(frozen=True, slots=True)
class Batch:
    scheduled: Sequence[ScheduledRequest]
    encode: Sequence[MediaItem] = ()
    """Pictures to be encoded before the tokens are computed, each identifier once."""
    encodings: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Blocks of the encoder cache, by identifier, of every picture that this step encodes or whose placeholders are
    among its tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a computed step says, by request id where only some requests have something."""

    token_ids: Sequence[int]
    """One sampled token for each request that samples, in batch order."""
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    """Of those tokens, for the requests that asked."""
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """As many as ScheduledRequest.num_prompt_logprobs says."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Requests for which there was no token to sample, and why; theirs in token_ids means nothing."""

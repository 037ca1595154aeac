"""A request inside the engine: its tokens, its blocks, and where it stands."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from connectors.wire.transfer import ECTransferParams, KVTransferParams
from engine.grammar import GrammarSpec, Matcher
from engine.hashing import hash_block, with_media
from engine.logprobs import TokenLogprobs
from engine.media.item import MediaItem


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Stop *strings* are found by the frontend, not here."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Alternatives to be told for each token sampled; 0: only the token itself. None: nothing is told."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not come up in the output."""
    allowed_tokens: bytes | None = None
    """A bitmask as a Matcher's of the tokens that may come up; None: all may."""
    grammar: GrammarSpec | None = None
    extra_args: Mapping[str, object] = field(default_factory=dict)
    """What a request carries for others than the sampler; the transfer params travel here, parsed, under their names
    on the wire."""


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """As WAITING, at the head of the queue; its tokens so far are kept, their KV is computed again."""
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        return self in _FINISHED


_S = RequestStatus
_FINISHED = frozenset({_S.FINISHED_STOPPED, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR})
_FAILED = frozenset({_S.FINISHED_ABORTED, _S.FINISHED_ERROR})
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.WAITING_FOR_REMOTE_KVS}) | _FAILED,
    _S.WAITING_FOR_REMOTE_KVS: frozenset({_S.WAITING}) | _FAILED,
    _S.RUNNING: frozenset({_S.PREEMPTED}) | _FINISHED,
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.WAITING_FOR_REMOTE_KVS}) | _FINISHED,
}
"""Every legal change of status; a finished request never changes again."""


@dataclass(eq=False, slots=True)
class Request:
    """One sequence being served. Owned by the engine's main thread once submitted."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    block_size: int
    hash_seed: bytes
    """Root of the block-hash chain: model fingerprint and cache salt."""
    arrival_time: float = field(default_factory=time.monotonic)
    priority: int = 0
    """Lower is served first, if the scheduler goes by it."""
    matcher: Matcher | None = None
    """Holds the output to sampling.grammar."""
    media: Sequence[MediaItem] = ()
    """Pictures in the prompt, in the order of their places."""

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)
    """Prompt and output so far."""
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose KV is in the blocks (optimistic while a load is under way)."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the local prefix cache when first scheduled."""
    num_external_tokens: int = 0
    """Prompt tokens loaded from another engine."""
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Of the first tokens of the prompt, as far as they are known; None for the very first."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of token_ids, extended by update_hashes()."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.update_hashes()

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        params = self.sampling.extra_args.get("kv_transfer_params")
        return params if isinstance(params, KVTransferParams) else None

    @property
    def ec_transfer_params(self) -> ECTransferParams | None:
        params = self.sampling.extra_args.get("ec_transfer_params")
        return params if isinstance(params, ECTransferParams) else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are not all known yet, and each needs the token before it to be computed here."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def handed_off(self) -> bool:
        return self.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)

    def to(self, status: RequestStatus) -> None:
        """Change status; an illegal change is a bug in the engine, not a user's mistake."""
        legal = TRANSITIONS.get(self.status, frozenset())
        assert status in legal, f"{self.request_id}: {self.status.name} -> {status.name}"
        self.status = status

    def add_prompt_logprobs(self, num_computed: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Those of the tokens that follow the first `num_computed`, in place of what is known of these."""
        known = self.prompt_logprobs
        del known[num_computed + 1 :]
        if not known:
            known.append(None)
        known += logprobs

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.update_hashes()

    def update_hashes(self) -> None:
        """Hash the blocks that are full of known tokens and not hashed yet."""
        size, hashes = self.block_size, self.block_hashes
        while (len(hashes) + 1) * size <= len(self.token_ids):
            start = len(hashes) * size
            hashes.append(self._hash(hashes, start, start + size))

    def hash_chain(self, num_tokens: int) -> list[bytes]:
        """Hashes of the blocks holding the first `num_tokens` tokens, the partial last one included."""
        full, rest = divmod(num_tokens, self.block_size)
        chain = self.block_hashes[:full]
        if rest:
            chain.append(self._hash(chain, full * self.block_size, num_tokens))
        return chain

    def _hash(self, before: Sequence[bytes], start: int, stop: int) -> bytes:
        """Of the block of tokens [start, stop), after those with these hashes."""
        parent = before[-1] if before else self.hash_seed
        if self.media:
            parent = with_media(parent, self.media, start, stop)
        return hash_block(parent, self.token_ids[start:stop])

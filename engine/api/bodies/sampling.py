"""How the answer is to be made: the sampling fields of a request, flat in most bodies, nested in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from connectors.wire.openai import bad_request
from engine.api.bodies.base import MAX_TOKEN_IDS, OFF, TokenId, at_most, check_ids
from engine.api.bodies.structured import StructuredBody
from engine.masks import pack
from engine.request import SamplingParams

MIN_TEMPERATURE = 0.01
"""Smaller ones are raised to this, as in vLLM: dividing by less overflows."""
MAX_TEMPERATURE = 1e4
"""Far beyond uniform; logits divided by it stay finite and apart in float32. The penalty's limits do the same."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGIT_BIAS = 100.0
# No client has use for more, and each entry costs time on every token.
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_CHOICES = 128
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1000
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 256, 200
DEFAULT_MAX_LOGPROBS = 20
_MAX_ID_DIGITS = 20
"""Digits of a token id as a key; int() itself refuses thousands of them."""
_INT64 = 2**63

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "use_beam_search": OFF,
    "top_logprobs": (None, 0),
    "echo": OFF,
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": OFF,
}
"""Known fields without a function here, with the values that do not ask for it."""


class SamplingBody(StructuredBody):
    LOGPROBS_FIELD: ClassVar[str] = "logprobs"

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _stop(cls, value: object) -> object:
        strings = [value] if isinstance(value, str) else value
        if strings is not None and not (isinstance(strings, list) and all(isinstance(s, str) for s in strings)):
            raise ValueError("a string or a list of strings expected")
        if strings and "" in strings:
            raise ValueError("a stop string cannot be empty")
        if strings and len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are possible, got {len(strings)}")
        if strings and (longest := max(map(len, strings))) > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string has at most {MAX_STOP_LENGTH} characters, got {longest}")
        return strings

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _stop_token_ids(cls, value: object) -> object:
        return at_most(MAX_STOP_TOKEN_IDS, value, "ids")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _logit_bias(cls, value: object) -> object:
        return at_most(MAX_LOGIT_BIAS_ENTRIES, value, "entries")

    @field_validator("allowed_token_ids", mode="before")
    @classmethod
    def _allowed_token_ids(cls, value: object) -> object:
        return at_most(MAX_TOKEN_IDS, value, "ids")

    @field_validator("bad_words", mode="before")
    @classmethod
    def _bad_words(cls, value: object) -> object:
        at_most(MAX_BAD_WORDS, value, "words")
        for word in value if isinstance(value, list) else ():
            if isinstance(word, str) and not 0 < len(word.strip()) <= len(word) <= MAX_BAD_WORD_LENGTH:
                raise ValueError(f"a word has 1 to {MAX_BAD_WORD_LENGTH} characters, not only spaces")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to be told for each token of the answer; None: nothing is. Endpoints have fields of their own,
        named by LOGPROBS_FIELD."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt."""
        return self.prompt_logprobs

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, *, max_tokens: int, vocab_size: int, max_logprobs: int = DEFAULT_MAX_LOGPROBS) -> SamplingParams:
        """The parameters for the engine; `max_tokens` is already cut to what the context has room for."""
        min_tokens = self.min_tokens or 0
        asked = self.requested_max_tokens
        if asked is not None and min_tokens > asked:
            raise bad_request(f"min_tokens: must not exceed max_tokens={asked}, got {min_tokens}", param="min_tokens")
        stop_token_ids = frozenset(self.stop_token_ids or ())
        check_ids(stop_token_ids, vocab_size, "stop_token_ids")
        allowed = self.allowed_token_ids
        check_ids(allowed or (), vocab_size, "allowed_token_ids")
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = self.top_k or 0
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
            top_k=0 if top_k == -1 else top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias or {}, vocab_size),
            skip_special_tokens=self.skip_special_tokens is not False,
            logprobs=_at_most(self.num_logprobs, max_logprobs, self.LOGPROBS_FIELD),
            prompt_logprobs=_at_most(self.num_prompt_logprobs, max_logprobs, "prompt_logprobs"),
            allowed_tokens=pack(allowed, vocab_size) if allowed else None,
            grammar=self.grammar_spec,
        )


def _at_most(asked: int | None, limit: int, param: str) -> int | None:
    if asked is not None and asked > limit:
        raise bad_request(f"{param}: this engine tells at most {limit} (--max-logprobs), got {asked}", param=param)
    return asked


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    by_id = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS) or int(key) >= vocab_size:
            raise bad_request(f"logit_bias: {key[:20]!r} is not a token id below {vocab_size}", param="logit_bias")
        by_id[int(key)] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value))
    return tuple(by_id.items())

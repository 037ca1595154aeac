"""The engine's requests for one call: prompts, and how they are to be answered, checked against what there is to serve
them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from connectors.wire.openai import bad_request
from engine.api.bodies.generation import StreamBody
from engine.api.bodies.sampling import SamplingBody
from engine.api.call import Call
from engine.api.context import LONG_TEXT, Serving
from engine.api.offload import offload
from engine.api.transfer import KV
from engine.grammar import GrammarError, GrammarSpec, Matcher
from engine.hashing import hash_seed
from engine.media.item import MediaItem
from engine.request import Request, SamplingParams
from engine.tokenizer import Tokenizer

PRIORITY_HEADER = "X-Vllm-Priority"
_INT64 = 2**63
_MAX_DIGITS = 20


async def make_requests(
    call: Call,
    body: StreamBody,
    sampling: SamplingBody,
    prompts: Sequence[list[int]],
    prefix: str,
    *,
    grammar: GrammarSpec | None = None,
    keep_special_tokens: bool = False,
    stop_token_ids: frozenset[int] = frozenset(),
    media: Sequence[MediaItem] = (),
) -> list[list[Request]]:
    """For each of the checked prompts, as many as the body wants answers. Raises APIError 400.

    `prefix` begins their ids; `grammar`, if given, takes the place of the body's own; `stop_token_ids` come on top of
    the body's; `media` are pictures in the prompt, which is the only one then.
    """
    serving, num_choices = call.serving, sampling.num_choices
    if num_choices > 1 and call.kv_transfer_params is not None and call.kv_transfer_params.do_remote_decode:
        raise bad_request("n: only 1 is possible for a prefill that another engine goes on with", param="n")
    priority = priority_of(call, sampling.priority)
    params = await offload(call.large or bool(sampling.bad_words), _sampling_params, serving, sampling)
    params = replace(
        params,
        grammar=grammar or params.grammar,
        skip_special_tokens=params.skip_special_tokens and not keep_special_tokens,
        stop_token_ids=params.stop_token_ids | stop_token_ids,
    )
    matchers = iter(await _matchers(serving, params.grammar, len(prompts) * num_choices))
    seed = hash_seed(serving.model_fingerprint, body.cache_salt)

    def group(index: int, prompt: list[int]) -> list[Request]:
        request_id = call.engine_id(prefix, index)
        max_tokens = min(params.max_tokens, serving.max_model_len - len(prompt))
        fitting = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        requests: list[Request] = []
        for number in range(num_choices):
            requests.append(
                Request(
                    request_id=request_id if num_choices == 1 else f"{request_id}-{number}",
                    prompt_token_ids=prompt,
                    sampling=_of_choice(fitting, call, number),
                    eos_token_ids=serving.tokenizer.eos_token_ids,
                    block_size=serving.block_size,
                    hash_seed=seed,
                    priority=priority,
                    matcher=next(matchers),
                    media=media,
                    block_hashes=list(requests[0].block_hashes) if requests else [],
                )
            )
        return requests

    size = sum(map(len, prompts)) * num_choices
    return await offload(size >= LONG_TEXT, lambda: [group(*each) for each in enumerate(prompts)])


def priority_of(call: Call, in_body: int | None) -> int:
    """The header's, or else the body's. Raises APIError 400."""
    header = call.http.headers.get(PRIORITY_HEADER)
    value = in_body or 0
    if header is not None:
        digits = header.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
            raise bad_request(f"{PRIORITY_HEADER}: a whole number expected, got {header[:20]!r}", param="priority")
        value = int(header)
        if not -_INT64 <= value < _INT64:
            raise bad_request(f"{PRIORITY_HEADER}: too large a number, got {header[:20]}", param="priority")
    if value and not call.serving.priority_scheduling:
        raise bad_request(
            f"priority: needs priority scheduling, which this engine is not started with "
            f"(--scheduling-policy priority), got {value}",
            param="priority",
        )
    return value


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell these words, at the beginning of a text and after a space. Raises APIError 400."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        try:
            bare, spaced = (
                tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
        except ValueError as error:
            raise bad_request(f"bad_words: {error}", param="bad_words") from None
        found[bare] = None
        # One that merely begins with a token for the space would forbid what the other spells already.
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            found[spaced] = None
    return tuple(sequence for sequence in found if sequence)


def _sampling_params(serving: Serving, sampling: SamplingBody) -> SamplingParams:
    """Those of all requests; what the context has room for depends on the prompt."""
    asked = sampling.requested_max_tokens
    params = sampling.sampling(
        max_tokens=serving.max_model_len if asked is None else asked,
        vocab_size=serving.vocab_size,
        max_logprobs=serving.max_logprobs,
    )
    return replace(params, bad_words=bad_word_ids(serving.tokenizer, sampling.bad_words or ()))


async def _matchers(serving: Serving, grammar: GrammarSpec | None, count: int) -> Sequence[Matcher | None]:
    """One for each of so many answers. Raises APIError 400."""
    if grammar is None:
        return [None] * count
    try:
        return await offload(True, serving.grammars.compile, grammar, count)
    except GrammarError as error:
        raise bad_request(f"{grammar.param}: {error}", param=grammar.param) from None


def _of_choice(params: SamplingParams, call: Call, number: int) -> SamplingParams:
    """One set of blocks is for one reader: the first choice fetches, the others find it in the prefix cache. Encodings
    are kept by name, so all may be told where they lie."""
    if number == 0:
        return replace(params, extra_args=call.extra_args)
    extra = {name: value for name, value in call.extra_args.items() if name != KV}
    return replace(params, seed=None if params.seed is None else params.seed + number, extra_args=extra)

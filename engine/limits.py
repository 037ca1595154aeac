"""What a request may ask of an engine, and when it has had enough: pure functions of a request and a few sizes."""

from __future__ import annotations

from engine.request import Request, RequestStatus


def num_blocks(request: Request, num_tokens: int) -> int:
    """Blocks that hold so many of its tokens."""
    return -(-num_tokens // request.block_size)


def obstacle(request: Request, max_model_len: int, pool_blocks: int) -> str | None:
    """Why this request can never be served, if so."""
    if not request.prompt_token_ids:
        return "the prompt is empty"
    if request.num_prompt_tokens >= max_model_len:
        return (
            f"the prompt has {request.num_prompt_tokens} tokens; with at least one of output that is more than "
            f"the {max_model_len} tokens this engine takes"
        )
    if num_blocks(request, request.num_prompt_tokens) > pool_blocks:
        return too_long(pool_blocks, request.num_prompt_tokens)
    return None


def too_long(pool_blocks: int, num_tokens: int) -> str:
    return f"{num_tokens} tokens do not fit into this engine's KV cache of {pool_blocks} blocks"


def max_prefill(request: Request) -> int | None:
    """How many prompt tokens may be computed for a request that was sent here for what the prefix cache holds."""
    params = request.kv_transfer_params
    # With prompt logprobs every engine computes all of the prompt: refused here, it would be the same elsewhere.
    if params is None or request.num_preemptions or request.wants_prompt_logprobs:
        return None
    return params.max_prefill_tokens


def cache_miss(request: Request, num_hits: int) -> str | None:
    """Why such a request is refused, if the prefix cache holds only `num_hits` blocks of it."""
    limit = max_prefill(request)
    missing = request.num_prompt_tokens - num_hits * request.block_size
    if limit is None or missing <= limit:
        return None
    return f"{missing} of {request.num_prompt_tokens} prompt tokens are not in the prefix cache any more"


def stop_reason(request: Request, token_id: int, max_model_len: int) -> tuple[RequestStatus | None, int | None]:
    """Whether this last token ends the request, and the stop token if it is one: EOS before stop tokens before
    length."""
    sampling = request.sampling
    if request.matcher is not None:  # which lets nothing follow its end, whatever min_tokens and ignore_eos want
        if token_id in request.eos_token_ids:
            return RequestStatus.FINISHED_STOPPED, None
        if token_id in sampling.stop_token_ids and request.matcher.may_end:
            return RequestStatus.FINISHED_STOPPED, token_id
    if request.num_output_tokens >= sampling.min_tokens:
        if token_id in request.eos_token_ids and not sampling.ignore_eos:
            return RequestStatus.FINISHED_STOPPED, None
        if token_id in sampling.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED, token_id
    if request.num_output_tokens >= sampling.max_tokens or request.num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH, None
    return None, None

"""How a client's body becomes the bodies of a turn's two legs: what all endpoints share."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, Protocol

from connectors.wire.ids import TokenIds
from connectors.wire.note import OUTPUT, TOKEN_NOTE
from connectors.wire.transfer import KVTransferParams
from router.answer import Answer

Body = dict[str, Any]
Params = dict[str, Any]
"""KVTransferParams as they are sent."""

# Not for the one token of a prefill leg. Some would be answered 400 there (stream_options without stream, min_tokens
# above max_tokens); a stop string or repetition that matches would end the request without transfer params; the rest
# costs the prefill engine time for nothing. What the chat template may read (tools, response_format) stays.
PREFILL_DROPS: Final = frozenset(
    {
        "stream",
        "stream_options",
        "max_completion_tokens",
        "min_tokens",
        "best_of",
        "stop",
        "include_stop_str_in_output",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "return_tokens_as_token_ids",
        "return_prompt_text",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "repetition_detection",
    }
)


# Keys that change how an answer is made or told, and never what the prompt is.
NOT_RENDERED: Final = frozenset(
    {
        *("stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "echo"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "bad_words", "allowed_token_ids"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "use_beam_search"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "repetition_detection"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "parallel_tool_calls", "service_tier", "store"),
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "priority", "session_id", "request_id"),
        "cache_salt",
    }
)

BY_IDS_PATH: Final = "/v1/completions"
BY_IDS_KEEPS: Final = frozenset({"model", "cache_salt", "priority"})
"""What of a chat a completion of its ids must have too, for its KV to be the same, and computed as soon."""


@dataclass(slots=True)
class Prefilled:
    """What the prefill leg brought."""

    engine: str
    params: KVTransferParams | None
    """None if the engine named no blocks to pull."""
    prompt_token_ids: TokenIds | None
    answered_at: float
    """Event loop time; the lease on the blocks runs from then."""
    seconds: float
    """What the leg took."""


class Endpoint(Protocol):
    """What tells one endpoint from another. Everything else about a turn is the same for all."""

    name: str
    """Label of the metrics."""
    path: str

    def alone(self, body: Body, *, ours: bool) -> str | None:
        """Why the KV of this request cannot be handed over, so that the decode engine must prefill; None if it can.
        `ours`: whether all engines that may decode it are Backhaul's; it counts only where `several` is true."""

    def several(self, body: Body) -> bool:
        """Whether there will be no one answer to go on from."""

    def history(self, body: Body) -> object:
        """The messages that make the conversation, or None if this endpoint has none."""

    def tokenize_body(self, body: Body, *, ours: bool) -> Body | TokenIds | None:
        """What to ask an engine's /tokenize for the ids of the prompt; or the ids themselves; or None if an answer
        would not be certain to be what the engines make of this body. `ours`: whether it is an engine of Backhaul."""

    def prefill_leg(self, body: Body, params: KVTransferParams, ids: TokenIds | None) -> Body:
        """The body for the prefill engine; `ids` are those of the prompt, if known."""

    def decode_leg(self, body: Body, params: KVTransferParams | None, ids: TokenIds | None, *, ours: bool) -> Body:
        """The body for the decode engine."""

    def answer(self, body: Body, *, ours: bool, expose: bool) -> Answer:
        """What reads the decode engine's answer; `expose` leaves transfer params in it."""


def alone(body: Body, *, ours: bool) -> str | None:
    """Reasons common to all endpoints."""
    if several(body) and not ours:
        # The children of one request would all pull under one lease; the first to finish ends it for the others.
        return "several_choices"
    if body.get("use_beam_search"):
        return "beam_search"
    if body.get("echo") or body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"  # every prompt token's logits are wanted where the answer is made
    return None


def several(body: Body) -> bool:
    return body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1)


def without(body: Body, keys: Set[str]) -> Body:
    return {key: value for key, value in body.items() if key not in keys}


def prefill_body(body: Body, params: Params, **changes: int) -> Body:
    """Prefill, make one token, hold the blocks, tell the ids. `changes` has the endpoint's names of the limit of 1."""
    return {
        **without(body, PREFILL_DROPS),
        **changes,
        "n": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }


def prefill_by_ids(body: Body, params: Params, ids: TokenIds) -> Body:
    """For an engine that has just tokenized this chat for us, and would have to render and tokenize it again."""
    kept = {key: value for key, value in body.items() if key in BY_IDS_KEEPS}
    return {**prefill_body(kept, params, max_tokens=1), "prompt": ids}


def decode_body(body: Body, params: Params | None, *, ours: bool) -> Body:
    """The client's body, asking for what the router wants to know besides: token ids, and usage in a stream."""
    known = params is not None and "prompt_token_ids" in params
    leg = {**body, TOKEN_NOTE: OUTPUT if known else True} if ours else {**body, "return_token_ids": True}
    options = body.get("stream_options")
    if body.get("stream") and isinstance(options, dict | None):
        leg["stream_options"] = {**(options or {}), "include_usage": True}
    if params is not None:
        leg["kv_transfer_params"] = params
    return leg


def tokenize_body(body: Body, asked: frozenset[str]) -> Body | None:
    """The part of a body that /tokenize needs, or None if there is more in it than `asked` and what is known not to
    change the prompt: what we do not know may."""
    given = {key for key, value in body.items() if value is not None}
    if given - asked - NOT_RENDERED:
        return None
    return {key: body[key] for key in given & asked}


def given_ids(prompt: object) -> TokenIds | None:
    """The ids that a client has sent for its prompt, if they can be a model's."""
    ids = TokenIds.of(prompt)
    return ids if ids is not None and max(ids.numbers) < 2**31 else None


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether the client itself asked for usage; an answer in one piece always has it."""
    options = body.get("stream_options")
    return not body.get("stream") or (isinstance(options, dict) and bool(options.get("include_usage")))

"""`/v1/responses` as two legs. The ids of the prompt travel inside the transfer params, as a chat's do."""

from __future__ import annotations

from typing import Final

from connectors.wire.ids import TokenIds
from connectors.wire.transfer import KVTransferParams
from router.answer import Answer, Wishes
from router.api import legs
from router.api.legs import Body, Params
from router.api.response_history import history_of
from router.conversation import media_digests
from router.response_answer import ResponseAnswer

ASKED: Final = frozenset({"model", "input", "instructions", "tools", "reasoning", "chat_template_kwargs"})
NOT_RENDERED: Final = frozenset(
    {
        *("max_output_tokens", "text", "tool_choice", "include", "truncation", "background", "top_logprobs"),
        *("metadata", "service_tier", "max_tool_calls", "prompt_cache_retention"),
    }
)


class Responses:
    name = "responses"
    path = "/v1/responses"

    def alone(self, body: Body, *, ours: bool) -> str | None:
        if body.get("previous_response_id") is not None or body.get("background"):
            return "stored_state"  # known to one engine only
        return legs.alone(body, ours=ours)

    def several(self, body: Body) -> bool:
        return False

    def history(self, body: Body) -> object:
        return history_of(body)

    def tokenize_body(self, body: Body, *, ours: bool) -> Body | TokenIds | None:
        if not ours or media_digests(history_of(body)):
            return None  # others' /tokenize knows chats only
        return legs.tokenize_body(legs.without(body, NOT_RENDERED), ASKED)

    def prefill_leg(self, body: Body, params: KVTransferParams, ids: TokenIds | None) -> Body:
        # Only what D answers is anything that an engine may store.
        leg = legs.prefill_body(body, _with_ids(body, params, ids), max_output_tokens=1, store=False)
        return legs.without(leg, frozenset({"n", "background"}))

    def decode_leg(self, body: Body, params: KVTransferParams | None, ids: TokenIds | None, *, ours: bool) -> Body:
        leg = legs.decode_body(body, None if params is None else _with_ids(body, params, ids), ours=ours)
        return leg if ours else legs.without(leg, frozenset({"stream_options", "return_token_ids"}))

    def answer(self, body: Body, *, ours: bool, expose: bool) -> Answer:
        asked = bool(body.get("return_token_ids"))
        return ResponseAnswer(Wishes(asked, asked, params=expose))


def _with_ids(body: Body, params: KVTransferParams, ids: TokenIds | None) -> Params:
    if ids is None or media_digests(history_of(body)):
        return params.to_json()
    return {**params.to_json(), "prompt_token_ids": ids}

"""`/v1/chat/completions` as two legs. The ids of the prompt travel inside the transfer params."""

from __future__ import annotations

from typing import Final

from connectors.wire.ids import TokenIds
from connectors.wire.transfer import KVTransferParams
from router.answer import Answer, ChoicesAnswer, Wishes
from router.api import legs
from router.api.legs import Body, Params

ASKED: Final = frozenset(
    {
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template", "chat_template_kwargs"),
    }
)
"""What any engine's /tokenize takes as its chat endpoint does."""
OURS_ASKED: Final = frozenset({"documents", "reasoning_effort"})
OURS_NOT_RENDERED: Final = frozenset({"tool_choice", "response_format"})
"""Other engines' templates may get to see them."""


class Chat:
    name = "chat"
    path = "/v1/chat/completions"

    def alone(self, body: Body, *, ours: bool) -> str | None:
        return legs.alone(body, ours=ours)

    def several(self, body: Body) -> bool:
        return legs.several(body)

    def history(self, body: Body) -> object:
        return body.get("messages")

    def tokenize_body(self, body: Body, *, ours: bool) -> Body | TokenIds | None:
        if not only_text(body.get("messages")):
            return None
        if ours:
            body = {key: value for key, value in body.items() if key not in OURS_NOT_RENDERED}
        return legs.tokenize_body(body, ASKED | OURS_ASKED if ours else ASKED)

    def prefill_leg(self, body: Body, params: KVTransferParams, ids: TokenIds | None) -> Body:
        return legs.prefill_body(body, _with_ids(body, params, ids), max_tokens=1, max_completion_tokens=1)

    def decode_leg(self, body: Body, params: KVTransferParams | None, ids: TokenIds | None, *, ours: bool) -> Body:
        return legs.decode_body(body, None if params is None else _with_ids(body, params, ids), ours=ours)

    def answer(self, body: Body, *, ours: bool, expose: bool) -> Answer:
        asked = bool(body.get("return_token_ids"))
        return ChoicesAnswer(Wishes(asked, asked, legs.wants_usage(body), expose), noted=ours)


def _with_ids(body: Body, params: KVTransferParams, ids: TokenIds | None) -> Params:
    # With pictures or sound ids do not say everything; the engine then renders the messages itself.
    if ids is None or not only_text(body.get("messages")):
        return params.to_json()
    return {**params.to_json(), "prompt_token_ids": ids}


def only_text(messages: object) -> bool:
    return isinstance(messages, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )

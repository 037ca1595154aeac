"""`/v1/chat/completions` as two legs. The ids of the prompt travel inside the transfer params."""

from __future__ import annotations

from router.api import legs
from router.api.legs import Body, Prefilled


class Chat:
    name = "chat"
    path = "/v1/chat/completions"

    def alone(self, body: Body) -> str | None:
        return legs.alone(body)

    def history(self, body: Body) -> object:
        return body.get("messages")

    def prefill_leg(self, body: Body) -> Body:
        return legs.prefill_body(body, max_tokens=1, max_completion_tokens=1)

    def decode_leg(self, body: Body, prefilled: Prefilled | None) -> Body:
        if prefilled is None or prefilled.params is None:
            return legs.decode_body(body, None)
        # With pictures or sound ids do not say everything; the decode engine then renders the messages itself.
        ids = prefilled.prompt_token_ids if _only_text(body.get("messages")) else None
        return legs.decode_body(body, prefilled.params.for_decode(ids))


def _only_text(messages: object) -> bool:
    return isinstance(messages, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )

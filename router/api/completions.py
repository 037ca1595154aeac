"""`/v1/completions` as two legs. The ids of the prompt take the prompt's place."""

from __future__ import annotations

from typing import Final

from connectors.wire.ids import TokenIds
from connectors.wire.note import OUTPUT, TOKEN_NOTE
from connectors.wire.transfer import KVTransferParams
from router.answer import Answer, ChoicesAnswer, Wishes
from router.api import legs
from router.api.legs import Body

ASKED: Final = frozenset({"model", "prompt", "add_special_tokens"})


class Completions:
    name = "completions"
    path = "/v1/completions"

    def alone(self, body: Body, *, ours: bool) -> str | None:
        if not _one_prompt(body.get("prompt")):
            return "several_prompts"
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        return legs.alone(body, ours=ours)

    def several(self, body: Body) -> bool:
        return legs.several(body) or not _one_prompt(body.get("prompt"))

    def history(self, body: Body) -> object:
        return None

    def tokenize_body(self, body: Body, *, ours: bool) -> Body | TokenIds | None:
        prompt = body.get("prompt")
        if (ids := legs.given_ids(prompt)) is not None:
            return ids
        return legs.tokenize_body(body, ASKED) if isinstance(prompt, str) else None

    def prefill_leg(self, body: Body, params: KVTransferParams, ids: TokenIds | None) -> Body:
        return _with_ids(legs.prefill_body(body, params.to_json(), max_tokens=1), ids)

    def decode_leg(self, body: Body, params: KVTransferParams | None, ids: TokenIds | None, *, ours: bool) -> Body:
        leg = _with_ids(legs.decode_body(body, None if params is None else params.to_json(), ours=ours), ids)
        return {**leg, TOKEN_NOTE: OUTPUT} if ids is not None and ours else leg

    def answer(self, body: Body, *, ours: bool, expose: bool) -> Answer:
        asked = bool(body.get("return_token_ids"))
        return ChoicesAnswer(Wishes(asked, asked, legs.wants_usage(body), expose), noted=ours)


def _with_ids(leg: Body, ids: TokenIds | None) -> Body:
    return {**leg, "prompt": ids} if ids is not None else leg


def _one_prompt(prompt: object) -> bool:
    """Whether the prompt is one text or one list of ids. A list of one prompt counts as one."""
    if not isinstance(prompt, list) or not prompt:
        return True  # what is no prompt at all, the engines say best
    return len(prompt) == 1 or all(isinstance(token, int) for token in prompt)

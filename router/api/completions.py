"""`/v1/completions` as two legs. The ids of the prompt take the prompt's place."""

from __future__ import annotations

from router.api import legs
from router.api.legs import Body, Prefilled


class Completions:
    name = "completions"
    path = "/v1/completions"

    def alone(self, body: Body) -> str | None:
        if not _one_prompt(body.get("prompt")):
            return "several_prompts"
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        return legs.alone(body)

    def history(self, body: Body) -> object:
        return None

    def prefill_leg(self, body: Body) -> Body:
        return legs.prefill_body(body, max_tokens=1)

    def decode_leg(self, body: Body, prefilled: Prefilled | None) -> Body:
        if prefilled is None:
            return legs.decode_body(body, None)
        params = None if prefilled.params is None else prefilled.params.for_decode()
        leg = legs.decode_body(body, params)
        if prefilled.prompt_token_ids:
            leg["prompt"] = prefilled.prompt_token_ids
        return leg


def _one_prompt(prompt: object) -> bool:
    """Whether the prompt is one text or one list of ids. A list of one prompt counts as one."""
    if not isinstance(prompt, list) or not prompt:
        return True  # what is no prompt at all, the engines say best
    return len(prompt) == 1 or all(isinstance(token, int) for token in prompt)

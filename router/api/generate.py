"""`/inference/v1/generate` as two legs: token ids in, token ids out. The ids of the prompt are the client's own."""

from __future__ import annotations

from typing import Final

from connectors.wire.ids import TokenIds
from connectors.wire.transfer import KVTransferParams
from router.answer import Answer, ChoicesAnswer, Wishes
from router.api import legs
from router.api.legs import Body

# Prefill makes one token that nobody gets; see PREFILL_DROPS for why each of these goes.
_PREFILL_DROPS: Final = legs.PREFILL_DROPS | {"output_mode", "parse_context"}


class Generate:
    name = "generate"
    path = "/inference/v1/generate"

    def alone(self, body: Body, *, ours: bool) -> str | None:
        return legs.alone(_sampling(body), ours=ours)

    def several(self, body: Body) -> bool:
        return legs.several(_sampling(body))

    def history(self, body: Body) -> object:
        return None

    def tokenize_body(self, body: Body, *, ours: bool) -> Body | TokenIds | None:
        ids = legs.given_ids(body.get("token_ids"))
        return ids if body.get("features") is None and body.get("content_parts") is None else None

    def prefill_leg(self, body: Body, params: KVTransferParams, ids: TokenIds | None) -> Body:
        sampling = legs.without(_sampling(body), legs.PREFILL_DROPS)
        return {
            **legs.without(body, _PREFILL_DROPS),
            "sampling_params": {**sampling, "max_tokens": 1, "n": 1},
            "stream": False,
            "return_token_ids": True,
            "kv_transfer_params": params.to_json(),
        }

    def decode_leg(self, body: Body, params: KVTransferParams | None, ids: TokenIds | None, *, ours: bool) -> Body:
        return legs.decode_body(body, None if params is None else params.to_json(), ours=ours)

    def answer(self, body: Body, *, ours: bool, expose: bool) -> Answer:
        wishes = Wishes(bool(body.get("return_token_ids")), True, legs.wants_usage(body), expose)
        return ChoicesAnswer(wishes, noted=ours)


def _sampling(body: Body) -> Body:
    sampling = body.get("sampling_params")
    return sampling if isinstance(sampling, dict) else {}
